# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a rank's cost does as the number of ranks grows: `python -m benchmarks.scale`."""

import os

# A thousand clients that connect at once would have a name looked up for each line of torch's log.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

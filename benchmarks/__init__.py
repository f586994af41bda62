# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Stock `fsdp_dtensor` and this package's format side by side, in one run: `python -m benchmarks --help`."""

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Training runs of Megatron-Bridge that save in `fsdp_dtensor_safe`: `python -m recipes --list`."""

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What CPU ranks cannot show: `python -m testing.gpu` on a machine with GPUs (docs/gpu.md)."""

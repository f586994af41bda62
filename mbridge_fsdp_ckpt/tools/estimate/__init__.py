# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save of a job would write, without weights, GPUs or ranks: planned over tensors without memory."""

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The files of `torch.distributed.checkpoint`, which stock `fsdp_dtensor` is made of."""

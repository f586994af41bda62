# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Where every slice of every tensor belongs: integers and names, no process group, no Megatron."""

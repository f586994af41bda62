# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How a checkpoint gets to its place, and how old ones go."""

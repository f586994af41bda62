# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Who took how long in a save: ranks and phases, from what each rank has written of itself."""

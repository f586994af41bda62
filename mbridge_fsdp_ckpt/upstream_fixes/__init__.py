# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Corrections of Megatron-Core and Megatron-Bridge, one file and one upstream issue each."""

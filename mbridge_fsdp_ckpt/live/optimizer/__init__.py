# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Optimizer state, whatever the optimizer: `base` says what an adapter does, `adapters` which one does it."""

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge calls its files beside the tensors."""

from __future__ import annotations

RUN_CONFIG = "run_config.yaml"

"""What Megatron-Bridge calls its files beside the tensors."""

from __future__ import annotations

RUN_CONFIG = "run_config.yaml"

"""What Megatron-Bridge calls its files beside the tensors."""

from __future__ import annotations

from mbridge_fsdp_ckpt.storage.format.names import MAX_TRAIN_STATE_BYTES, PROGRESS, TRAIN_STATE

__all__ = ["MAX_TRAIN_STATE_BYTES", "PROGRESS", "RUN_CONFIG", "TRAIN_STATE"]

RUN_CONFIG = "run_config.yaml"

"""What Megatron-Bridge calls its files beside the tensors."""

from __future__ import annotations

RUN_CONFIG = "run_config.yaml"

TRAIN_STATE, TRAIN_STATE_TRACKER = "train_state.pt", "latest_train_state.pt"
"""In an iteration directory, and a copy of the newest in the root."""

MAX_TRAIN_STATE_BYTES = 1 << 28

PROGRESS = "train_state"
"""Among a checkpoint's values: iteration, samples and operations so far."""

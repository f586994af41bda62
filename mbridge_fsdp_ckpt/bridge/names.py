"""What Megatron-Bridge calls its files beside the tensors."""

from __future__ import annotations

RUN_CONFIG = "run_config.yaml"

TRAIN_STATE = "train_state.pt"
"""In an iteration directory; `storage.trackers` has that of the root."""

MAX_TRAIN_STATE_BYTES = 1 << 28

PROGRESS = "train_state"
"""Among a checkpoint's values: iteration, samples and operations so far."""

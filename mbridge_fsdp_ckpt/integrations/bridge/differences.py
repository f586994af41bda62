# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one release of Bridge has and another has not: each caller gets what it would do without."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.bridge.training import checkpointing, optim
from megatron.bridge.training.utils import checkpoint_utils


def is_hugging_face(directory: str) -> bool:
    """Whether Bridge itself would read a directory of Hugging Face's as a checkpoint; 0.5 reads none."""
    found = getattr(checkpoint_utils, "is_hf_checkpoint_dir", None)
    return bool(found(directory)) if found is not None else False


def recovery_directories(load: str | None, checkpoint_config: Any) -> tuple[str, ...]:
    """Where a resume looks for recovery (non-persistent) checkpoints; 0.5 says so in the middle of its load."""
    if checkpoint_config.non_persistent_ckpt_type != "global":
        return ()
    find = getattr(checkpointing, "_get_global_non_persistent_checkpoint_dirs", None)
    if find is not None:
        return tuple(find(load, checkpoint_config))
    other = checkpoint_config.non_persistent_global_ckpt_dir
    if other or load is None:
        return (other,) if other else ()
    return (f"{load}/{checkpointing._NON_PERSISTENT_CKPT_SUBDIR}",)


def has_recovery_checkpoint(load: str | None, checkpoint_config: Any) -> bool:
    """Whether Bridge's set-up sees a recovery checkpoint; that of 0.5 looks for none."""
    has = getattr(checkpointing, "_has_global_non_persistent_checkpoint", None)
    return bool(has(load, checkpoint_config)) if has is not None else False


def dataloader_directory() -> str | None:
    """Where, below the checkpoints, a data loader's position goes by default; 0.5 saves it only on request."""
    found: str | None = getattr(checkpointing, "DATALOADER_STATE_SUBDIR", None)
    return found


def record_dataloader_directory(context: dict[str, Any] | None, root: str) -> None:
    """Tell Bridge's set-up where the data loader's position of this checkpoint lies; 0.5 has a setting instead."""
    record = getattr(checkpointing, "_record_dataloader_state_dir", None)
    if record is not None:
        record(context, root)


def starts_with_fresh_optimizer() -> bool:
    """Whether Bridge trains on with a fresh optimizer where the checkpoint has none, as 0.7 does; 0.6 fails."""
    load = inspect.unwrap(checkpointing._load_checkpoint_from_path)
    return "checkpoint_saved_optimizer" in load.__code__.co_varnames


def copies_refresher() -> Any:
    """What refreshes host copies of weights after a load; 0.5 has nothing that would have to be replaced."""
    return getattr(optim, "sync_hybrid_device_optimizer_fp32_master_copies", None)

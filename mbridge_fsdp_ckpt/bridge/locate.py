"""Which iteration directory a run resumes from."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.training.utils import checkpoint_utils as names

from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.hosts.root import RELEASE
from mbridge_fsdp_ckpt.storage.commit.methods import recover
from mbridge_fsdp_ckpt.storage.files import entries
from mbridge_fsdp_ckpt.storage.format.names import ITERATION, MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.store import AnyPath, as_path

NON_PERSISTENT = "non_persistent"  # Bridge's default directory for global non-persistent checkpoints


@dataclass(frozen=True, slots=True)
class Located:
    """An iteration directory; `release` marks weights without training progress."""

    directory: AnyPath
    release: bool = False


def locate(load_dir: str | None, checkpoint_config: Any, step: int | None) -> Located | None:
    """The directory to load: the given one if it is an iteration directory, the given step's, or the last one.

    Args:
        load_dir: Root or iteration directory.
        checkpoint_config: Bridge's checkpoint configuration.
        step: The user's choice of iteration (`ckpt_step`).

    Returns:
        None where there is no checkpoint at all.

    Raises:
        NotACheckpointError: The chosen step, or the one that the tracker names, is not there.
    """
    if load_dir is None:
        return None
    root = as_path(load_dir)
    if (root / MANIFEST_NAME).exists() or names.is_checkpoint_iteration_directory(load_dir):
        return Located(root)
    if step is not None:
        return Located(_existing(root, step, "checkpoint.ckpt_step"))
    candidates = [_tracked(directory) for directory in _roots(root, checkpoint_config)]
    found = [candidate for candidate in candidates if candidate is not None]
    if not found:
        return None
    newest = max(found, key=lambda candidate: candidate[1])
    if newest[1] < 0:
        return Located(as_path(names.get_checkpoint_name(str(newest[0]), 0, release=True)), release=True)
    return Located(_existing(newest[0], newest[1], "the tracker file"))


def _roots(root: AnyPath, checkpoint_config: Any) -> list[AnyPath]:
    if checkpoint_config.non_persistent_ckpt_type != "global":
        return [root]
    other = checkpoint_config.non_persistent_global_ckpt_dir
    return [root, as_path(other) if other else root / NON_PERSISTENT]


def _tracked(root: AnyPath) -> tuple[AnyPath, int] | None:
    """The iteration that a root's tracker names; -1 for a release."""
    text = as_path(names.get_checkpoint_tracker_filename(str(root)))
    if text.is_file():
        content = text.read_text().strip()
        if content == RELEASE:
            return root, -1
        if content.isdecimal():
            return root, int(content)
        raise NotACheckpointError(
            expected="an iteration number in the tracker file",
            found=repr(content[:100]),
            remedy="Write the number of a complete iteration into it, or delete it.",
            key=str(text),
        )
    state = root / f"{names.TRACKER_PREFIX}_{names.TRAIN_STATE_FILE}"
    if state.is_file():
        step = torch.load(io.BytesIO(state.read_bytes()), map_location="cpu", weights_only=True)["step"]
        return root, int(step)
    return None


def _existing(root: AnyPath, step: int, named_by: str) -> AnyPath:
    directory = as_path(names.get_checkpoint_name(str(root), step))
    recover(directory)
    if not directory.is_dir():
        there = sorted(path.name for path in entries(root, ITERATION))
        raise NotACheckpointError(
            expected=f"{directory.name}, which {named_by} names",
            found=", ".join(there[-8:]) or "no iteration directory",
            remedy="Choose one that is there with checkpoint.ckpt_step.",
            key=str(root),
        )
    return directory

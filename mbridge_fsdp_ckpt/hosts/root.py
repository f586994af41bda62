"""The root of a run's checkpoints: the iteration directory that is meant, and that is there."""

from __future__ import annotations

from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.storage.commit import trackers
from mbridge_fsdp_ckpt.storage.commit.methods import recover
from mbridge_fsdp_ckpt.storage.files import entries, what_is_there
from mbridge_fsdp_ckpt.storage.format.head import has_head
from mbridge_fsdp_ckpt.storage.format.names import ITERATION, iteration_name
from mbridge_fsdp_ckpt.storage.store import AnyPath

_LISTED = 8  # iterations that an error names: the newest


def find_checkpoint(path: AnyPath) -> AnyPath:
    """The iteration directory: the path itself, or the one that the trackers of a run's root mean.

    Returns:
        The path itself also where there is no tracker.

    Raises:
        NotACheckpointError: What a tracker names is not there, or it is not legible: see `storage.commit.trackers`.
    """
    if has_head(path):
        return path
    named = trackers.meant(path)
    if named is None:
        return path
    return existing(path, named.name, named.tracker.name, "Give an iteration directory (iter_0000010).")


def chosen(root: AnyPath, number: int, option: str) -> AnyPath:
    """The directory of an iteration that the user chose.

    Args:
        root: The root of a run's checkpoints.
        number: The iteration.
        option: What the user chose it with.

    Raises:
        NotACheckpointError: It is not there.
    """
    return existing(root, iteration_name(number), option, f"Choose one that is there with {option}.")


def existing(root: AnyPath, name: str, named_by: str, remedy: str) -> AnyPath:
    """A checkpoint's directory below a root.

    If a save died between its two renames, it is moved back first.

    Raises:
        NotACheckpointError: It is not there.
    """
    directory = root / name
    recover(directory)
    if not directory.is_dir():
        there = sorted(path.name for path in entries(root, ITERATION))
        raise NotACheckpointError(
            expected=f"{name}, which {named_by} names",
            found=", ".join(there[-_LISTED:]) or f"no iteration directory; {what_is_there(root)}",
            remedy=remedy,
            key=str(root),
        )
    return directory

"""Old checkpoints: which there are, which may go, and that none goes while somebody reads it.

A load leaves `.reading-iter_0000010-<token>` beside the checkpoint and touches it while it reads.  Whoever prunes
leaves such a checkpoint alone, until the file has not been touched for an hour.  A training job prunes in the
background: no rank waits for it, and nothing fails by it.

`keeps` has all that speaks for a checkpoint, and is asked just before each removal and once more when nobody can reach
it: a pruning may have waited behind others while the run went back to an older iteration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mbridge_fsdp_ckpt.storage.commit import marker, methods, removal, trackers
from mbridge_fsdp_ckpt.storage.commit.lease import is_fresh, is_stale, now, renewing
from mbridge_fsdp_ckpt.storage.commit.target import obstacle
from mbridge_fsdp_ckpt.storage.files import entries
from mbridge_fsdp_ckpt.storage.format.head import has_readable_head, head_of
from mbridge_fsdp_ckpt.storage.format.names import (
    READING,
    RELEASE,
    TRACKER,
    beside,
    iteration_of,
    read_of,
)
from mbridge_fsdp_ckpt.storage.store import AnyPath, store_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration directory.

    Args:
        number: The iteration.
        directory: Its directory.
        complete: Whether it has a manifest, or stock's `.metadata`.
    """

    number: int
    directory: AnyPath
    complete: bool


def iterations(root: AnyPath) -> list[Iteration]:
    """The iteration directories below a root, oldest first."""
    found = []
    for path in root.iterdir():
        number = iteration_of(path.name)
        if number is not None and path.is_dir():
            found.append(Iteration(number, path, has_readable_head(path)))
    return sorted(found, key=lambda iteration: iteration.number)


def prunable(root: AnyPath, keep: int, also_keep: int | None = None) -> list[Iteration]:
    """Complete checkpoints older than the newest `keep`, without `also_keep` and those that `keeps` says stay."""
    complete = [iteration for iteration in iterations(root) if iteration.complete]
    old = complete[: max(0, len(complete) - keep)]
    return [i for i in old if i.number != also_keep and not keeps(i.directory)]


def keeps(directory: AnyPath) -> str:
    """Why a complete checkpoint must not be removed, in words; empty where it may be.

    Raises:
        NotACheckpointError: A tracker beside it is not legible: what that names is not known.
    """
    if tracker := named_by(directory):
        return "the tracker names it" if tracker == TRACKER else f"{tracker} names it"
    if being_read(directory):
        return "being read"
    if link := _link_to(directory):
        return f"{link} leads to it"
    if _is_about_to_be_named(directory):
        return "saved just now: no tracker was written since"
    if _is_being_written(directory):
        return "a save goes on in it"
    found = obstacle(directory)
    return found.found if found is not None else ""


def named_by(directory: AnyPath) -> str:
    """The tracker that names a checkpoint; empty where none does.

    Raises:
        NotACheckpointError: A tracker is not legible.
    """
    number = iteration_of(directory.name)
    for named, tracker in trackers.every_named(directory.parent).items():
        if directory.name == RELEASE if named is None else named == number:
            return tracker
    return ""


def _link_to(directory: AnyPath) -> str:
    """The name of a link beside a directory that leads to it, or into it; empty where there is none."""
    local = store_of(directory).local
    if local is None:
        return ""
    place = Path(os.path.realpath(local.parent), local.name)
    links = (path for path in entries(directory.parent) if path.name != directory.name and store_of(path).is_link())
    return next((link.name for link in links if Path(os.path.realpath(str(link))).is_relative_to(place)), "")


def _is_about_to_be_named(directory: AnyPath) -> bool:
    """Whether it was committed within the hour, and after the trackers were written: a save lets them name it next."""
    try:
        head = head_of(directory)
        published = [tracker.stat().st_mtime for tracker in trackers.present(directory.parent)]
        if head is None or not published or head.stat().st_mtime <= max(published):
            return False
        return is_fresh(head, now(directory.parent))
    except FileNotFoundError:  # another save has changed it meanwhile
        return True


def _is_being_written(directory: AnyPath) -> bool:
    """Whether a save by marker goes on in it, on a file system: a removal takes the directory as a whole there."""
    is_local = store_of(directory).local is not None
    return is_local and marker.holds_of_another(directory) and not is_stale(directory)


def prune(root: AnyPath, keep: int, also_keep: int | None = None) -> list[Iteration]:
    """Remove old checkpoints; one process calls this, after a newer one was committed.

    Args:
        root: Where the iteration directories are.
        keep: How many of the newest stay.
        also_keep: An iteration that stays whatever its age: the one that the user chose to resume from.

    Returns:
        What was removed.

    Raises:
        NotACheckpointError: A tracker is not legible.
    """
    marks = [mark for mark in entries(root, READING) if read_of(mark.name)]
    for mark in [mark for mark in marks if is_stale(mark)]:
        store_of(mark).remove()
    removed = []
    for iteration in prunable(root, keep, also_keep):
        try:
            if remove_unless_kept(iteration.directory):
                removed.append(iteration)
        except OSError as error:  # one that stays keeps no other
            _log.warning("%s could not be removed: %s", iteration.directory, error)
    return removed


def prune_later(root: AnyPath, keep: int, also_keep: int | None = None) -> None:
    """Prune in the background: training goes on, whatever the storage says; see `prune`."""

    def prune_and_say() -> None:
        for iteration in prune(root, keep, also_keep):
            _log.info("removed %s", iteration.directory)

    removal.later(f"pruning {root}", prune_and_say)


def remove_unless_kept(directory: AnyPath) -> bool:
    """Remove one checkpoint that nothing speaks for; whether it is gone.

    One that a save puts in its place meanwhile stays.

    Raises:
        NotACheckpointError: A tracker is not legible.
        OSError: The storage refused.
    """
    if not has_readable_head(directory):
        return False
    seen = methods.identity(directory)
    if keeps(directory):
        return False

    def may_go(place: AnyPath) -> bool:
        return methods.identity(place) == seen and not keeps(directory)

    try:
        return methods.remove(directory, may_go)
    except FileNotFoundError:  # another one was faster
        return not has_readable_head(directory)


@contextmanager
def reading(directory: AnyPath, *, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Keep a checkpoint from being pruned; gives what to call from time to time as a sign of life.

    The lease stands beside the directory itself, where it is reached through a link.  A reader who may not write there
    reads without protection.
    """
    local = store_of(directory).local
    directory = directory if local is None else Path(os.path.realpath(local))
    lease = directory.parent / beside(READING, directory.name)
    try:
        if enabled and (directory.exists() or directory.name in methods.put_aside(directory.parent)):
            lease.touch()
        else:
            enabled = False
    except OSError as error:
        enabled = False
        _log.info("%s is not kept from being pruned: %s", directory, error)
    try:
        yield renewing(lease) if enabled else lambda: None
    finally:
        if enabled:
            _let_go(lease)


def _let_go(lease: AnyPath) -> None:
    """That it stays fails no reader: it is stale in an hour."""
    try:
        store_of(lease).remove()
    except OSError as error:
        _log.info("%s stays until it is stale: %s", lease, error)


def being_read(directory: AnyPath) -> bool:
    """Whether a living reader keeps it."""
    leases = (path for path in entries(directory.parent, READING) if read_of(path.name) == directory.name)
    return not all(is_stale(lease) for lease in leases)

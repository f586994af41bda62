# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Old checkpoints: which exist, which may be removed, and leases that keep those that are being read.

A load leaves `.reading-iter_0000010-<token>` beside the checkpoint and touches it while it reads.  A pruning leaves
such a checkpoint alone until the file has not been touched for an hour.  A training job prunes in the background: no
rank waits for it, and it fails nothing.

`keeps` collects all reasons to keep a checkpoint.  It is called just before each removal, and once more when the
checkpoint is renamed: a pruning may have waited behind others while the run went back to an older iteration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mbridge_fsdp_ckpt.commit import marker, methods, removal, trackers
from mbridge_fsdp_ckpt.commit.lease import is_fresh, is_stale, now, renewing
from mbridge_fsdp_ckpt.commit.readable import defect
from mbridge_fsdp_ckpt.commit.target import obstacle
from mbridge_fsdp_ckpt.format.metadata import has_readable_metadata, metadata_of
from mbridge_fsdp_ckpt.format.names import (
    READING,
    RELEASE,
    TRACKER,
    beside,
    iteration_name,
    iteration_of,
    read_of,
)
from mbridge_fsdp_ckpt.io.files import entries
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration directory.

    Args:
        number: The iteration.
        directory: The directory.
        complete: Whether the directory has a manifest, or stock's `.metadata`.
    """

    number: int
    directory: AnyPath
    complete: bool


def iterations(root: AnyPath) -> list[Iteration]:
    """The iteration directories below a root, oldest first."""
    found = []
    for path in root.iterdir():
        number = _number_of(path.name)
        if number is not None and path.is_dir():
            found.append(Iteration(number, path, has_readable_metadata(path)))
    return sorted(found, key=lambda iteration: iteration.number)


def _number_of(name: str) -> int | None:
    """The iteration of a directory with exactly the name that a run looks for; None for a copy called `iter_10`."""
    number = iteration_of(name)
    return number if number is not None and name == iteration_name(number) else None


@dataclass(frozen=True, slots=True)
class Look:
    """The entries of a root, at one moment, that are reasons to keep checkpoints in it.

    Args:
        named: The iterations that trackers name, as `trackers.every_named` returns them.
        leases: The leases of readers.
        links: The targets of links in the root, by the links' names.
    """

    named: Mapping[int | None, str]
    leases: Sequence[AnyPath]
    links: Mapping[str, Path]


def look(root: AnyPath) -> Look:
    """List the entries of a root that are reasons to keep checkpoints.

    Raises:
        NotACheckpointError: A tracker is not legible, so that it is unknown which checkpoint it names.
    """
    found = entries(root)
    links = {path.name: Path(os.path.realpath(str(path))) for path in found if store_of(path).is_link()}
    return Look(trackers.every_named(root), [path for path in found if read_of(path.name)], links)


def older(found: Sequence[Iteration], keep: int) -> list[Iteration]:
    """Complete checkpoints of which `keep` newer ones can be read: see `readable`."""
    complete, newer = [iteration for iteration in found if iteration.complete], 0
    while len(complete) > keep - newer:
        if newer == keep:
            return complete
        newer += _can_be_read(complete.pop().directory)
    return []


def _can_be_read(directory: AnyPath) -> bool:
    try:
        return not defect(directory)
    except FileNotFoundError:  # another save, or another pruning, has changed it meanwhile
        return False


def prunable(root: AnyPath, keep: int, also_keep: int | None = None) -> list[Iteration]:
    """Checkpoints that may be removed: those that are `older`, without those that `keeps` says stay.

    Args:
        root: The root of a run's checkpoints.
        keep: How many of the newest checkpoints that can be read stay.
        also_keep: An iteration that stays, too.
    """
    old = [iteration for iteration in older(iterations(root), keep) if iteration.number != also_keep]
    seen = look(root) if old else None
    return [iteration for iteration in old if not keeps(iteration.directory, seen=seen)]


def keeps(directory: AnyPath, keep: int = 0, seen: Look | None = None) -> str:
    """The reason why a complete checkpoint must not be removed, as a text; empty if it may be removed.

    Args:
        directory: The checkpoint.
        keep: How many of the newest checkpoints that can be read stay; 0 does not apply this rule.
        seen: The entries of its root, from `look`; None looks now.

    Raises:
        NotACheckpointError: A tracker beside it is not legible, so that it is unknown which checkpoint it names.
    """
    seen = look(directory.parent) if seen is None else seen
    try:
        return _reason_beside(seen, directory) or _reason_inside(directory) or _reason_among_newest(directory, keep)
    except FileNotFoundError:  # another save, or another pruning, has changed it meanwhile
        return "changed just now"


def _reason_beside(seen: Look, directory: AnyPath) -> str:
    """A reason to keep a checkpoint that lies beside it: a tracker, a lease or a link; empty if there is none."""
    if tracker := named_by(directory, seen.named):
        return "the tracker names it" if tracker == TRACKER else f"{tracker} names it"
    if _is_read(directory, seen.leases):
        return "being read"
    if link := _link_to(directory, seen.links):
        return f"{link} leads to it"
    return ""


def _reason_inside(directory: AnyPath) -> str:
    """A reason to keep a checkpoint from its content and its age; empty if there is none."""
    if _is_about_to_be_named(directory):
        return "saved just now: no tracker was written since"
    if _is_being_written(directory):
        return "a save goes on in it"
    found = obstacle(directory)
    return found.found if found is not None else ""


def named_by(directory: AnyPath, named: Mapping[int | None, str]) -> str:
    """The name of the tracker that names a checkpoint; empty if none does.

    Args:
        directory: The checkpoint.
        named: The iterations that trackers name, from `trackers.every_named`.
    """
    number = iteration_of(directory.name)
    return named.get(number, "") if number is not None or directory.name == RELEASE else ""


def _link_to(directory: AnyPath, links: Mapping[str, Path]) -> str:
    """The name of a link beside a directory that leads to it, or into it; empty if there is none."""
    local = store_of(directory).local
    if local is None:
        return ""
    place = Path(os.path.realpath(local.parent), local.name)
    return next((name for name, leads in links.items() if name != local.name and leads.is_relative_to(place)), "")


def _is_about_to_be_named(directory: AnyPath) -> bool:
    """Whether a checkpoint was committed within the hour and after the trackers were written, which name it next."""
    metadata = metadata_of(directory)
    published = [tracker.stat().st_mtime for tracker in trackers.present(directory.parent)]
    if metadata is None or not published or metadata.stat().st_mtime <= max(published):
        return False
    return is_fresh(metadata, now(directory.parent))


def _is_being_written(directory: AnyPath) -> bool:
    """Whether a save by marker is in progress in a directory; on a file system it renews the directory's time."""
    others = marker.of_another(directory)
    if not others or store_of(directory).local is not None:
        return bool(others) and not is_stale(directory)
    time = now(directory.parent)
    return any(is_fresh(path, time) for path in others)


def _reason_among_newest(directory: AnyPath, keep: int) -> str:
    """The reason for which the retention count keeps a checkpoint: fewer than `keep` readable ones are newer.

    Returns:
        Empty if it need not be kept, or if `keep` is 0, which does not apply this rule.
    """
    number = _number_of(directory.name)
    if keep < 1 or number is None:
        return ""
    newer = [one for one in iterations(directory.parent) if one.number > number]
    return "" if older([Iteration(number, directory, True), *newer], keep) else f"among the newest {keep}"


def prune(root: AnyPath, keep: int, also_keep: int | None = None) -> list[Iteration]:
    """Remove old checkpoints.  One process calls it, after a newer checkpoint was committed.

    Args:
        root: The root of a run's checkpoints.
        keep: How many of the newest checkpoints that can be read stay.  One that cannot be read is removed only if
            these are there.
        also_keep: An iteration that stays whatever its age: the one that the user chose to resume from.

    Returns:
        The checkpoints that were removed.

    Raises:
        NotACheckpointError: A tracker is not legible.
    """
    for mark in entries(root, READING):
        if read_of(mark.name) and is_stale(mark):
            _remove_lease(mark)
    removed = []
    for iteration in prunable(root, keep, also_keep):
        try:
            if remove_unless_kept(iteration.directory, keep):
                removed.append(iteration)
        except OSError as error:  # one that stays keeps no other
            _log.warning("%s could not be removed: %s", iteration.directory, error)
    return removed


def prune_later(root: AnyPath, keep: int, also_keep: int | None = None) -> None:
    """Prune in the background, as `prune` does.  A failure is logged, and training continues."""
    root = _resolved(root)

    def prune_and_say() -> None:
        for iteration in prune(root, keep, also_keep):
            _log.info("removed %s", iteration.directory)

    removal.later(f"pruning {root}", prune_and_say)


def remove_later(directory: AnyPath) -> None:
    """Remove one checkpoint in the background, as `remove_unless_kept` does."""
    directory = _resolved(directory.parent) / directory.name
    removal.later(f"removing {directory}", lambda: remove_unless_kept(directory))


def _resolved(directory: AnyPath) -> AnyPath:
    """The path of a directory without links, which may lead elsewhere later; in an object store, the path itself."""
    local = store_of(directory).local
    return directory if local is None else Path(os.path.realpath(local))


def remove_unless_kept(directory: AnyPath, keep: int = 0, shown: object = None) -> bool:
    """Remove one checkpoint if there is no reason to keep it; returns whether it is gone.

    A checkpoint that a save puts in its place meanwhile stays.

    Args:
        directory: The checkpoint.
        keep: How many of the newest checkpoints that can be read stay; 0 does not apply this rule.
        shown: The identity of the checkpoint that the user has confirmed to remove; None if nobody was asked.

    Raises:
        NotACheckpointError: A tracker is not legible.
        OSError: The storage refused.
    """

    def may_go(place: AnyPath) -> bool:
        return methods.identity(place) == seen and not keeps(directory, keep)

    if not has_readable_metadata(directory):
        return False
    try:
        seen = methods.identity(directory)
        if shown not in (None, seen) or keeps(directory, keep):
            return False
        return methods.remove(directory, may_go)
    except FileNotFoundError:  # another one was faster
        return not has_readable_metadata(directory)


@contextmanager
def reading(directory: AnyPath, *, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Keep a checkpoint from being pruned while the block runs, by a lease beside it.

    If the directory is reached through a link, the lease lies beside the directory itself.  A reader that may not write
    there reads without a lease.

    Args:
        directory: The checkpoint.
        enabled: Whether to keep it at all.

    Yields:
        A function to call from time to time, which renews the lease.
    """
    directory = _resolved(directory)
    lease = directory.parent / beside(READING, directory.name)
    try:
        if enabled and (directory.exists() or directory.name in methods.put_aside(directory.parent)):
            lease.touch()
        else:
            enabled = False
    except OSError as error:
        enabled = False
        _log.info("%s is read without a lease, and may be pruned: %s", directory, error)
    try:
        yield renewing(lease) if enabled else lambda: None
    finally:
        if enabled:
            _remove_lease(lease)


def _remove_lease(lease: AnyPath) -> None:
    """Remove a lease.  If that fails, only log it: the lease is stale in an hour."""
    try:
        store_of(lease).remove()
    except OSError as error:
        _log.info("%s could not be removed, and is stale in an hour: %s", lease, error)


def being_read(directory: AnyPath) -> bool:
    """Whether a reader that is alive has a lease on a checkpoint."""
    return _is_read(directory, entries(directory.parent, READING))


def _is_read(directory: AnyPath, leases: Sequence[AnyPath]) -> bool:
    return not all(is_stale(lease) for lease in leases if read_of(lease.name) == directory.name)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
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
        number = _number_of(path.name)
        if number is not None and path.is_dir():
            found.append(Iteration(number, path, has_readable_metadata(path)))
    return sorted(found, key=lambda iteration: iteration.number)


def _number_of(name: str) -> int | None:
    """The iteration of which a run looks for a directory of exactly this name; None of a copy called `iter_10`."""
    number = iteration_of(name)
    return number if number is not None and name == iteration_name(number) else None


@dataclass(frozen=True, slots=True)
class Look:
    """What lies in a root at one moment and speaks for checkpoints in it.

    Args:
        named: What trackers name, as `trackers.every_named` has it.
        leases: Of readers.
        links: By their names, where links in it lead.
    """

    named: Mapping[int | None, str]
    leases: Sequence[AnyPath]
    links: Mapping[str, Path]


def look(root: AnyPath) -> Look:
    """Look at a root.

    Raises:
        NotACheckpointError: A tracker is not legible: what that names is not known.
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
    """Those that are `older`, without `also_keep` and those that `keeps` says stay."""
    old = [iteration for iteration in older(iterations(root), keep) if iteration.number != also_keep]
    seen = look(root) if old else None
    return [iteration for iteration in old if not keeps(iteration.directory, seen=seen)]


def keeps(directory: AnyPath, keep: int = 0, seen: Look | None = None) -> str:
    """Why a complete checkpoint must not be removed, in words; empty where it may be.

    Args:
        directory: The checkpoint.
        keep: How many of the newest that can be read stay.
        seen: What its root was seen to have; None looks now.

    Raises:
        NotACheckpointError: A tracker beside it is not legible: what that names is not known.
    """
    seen = look(directory.parent) if seen is None else seen
    try:
        return _said_by(seen, directory) or _said_in(directory) or _among_newest(directory, keep)
    except FileNotFoundError:  # another save, or another pruning, has changed it meanwhile
        return "changed just now"


def _said_by(seen: Look, directory: AnyPath) -> str:
    """What beside a checkpoint speaks for it."""
    if tracker := named_by(directory, seen.named):
        return "the tracker names it" if tracker == TRACKER else f"{tracker} names it"
    if _is_read(directory, seen.leases):
        return "being read"
    if link := _link_to(directory, seen.links):
        return f"{link} leads to it"
    return ""


def _said_in(directory: AnyPath) -> str:
    """What in a checkpoint, and its age, speak for it."""
    if _is_about_to_be_named(directory):
        return "saved just now: no tracker was written since"
    if _is_being_written(directory):
        return "a save goes on in it"
    found = obstacle(directory)
    return found.found if found is not None else ""


def named_by(directory: AnyPath, named: Mapping[int | None, str]) -> str:
    """Of what trackers name, the tracker that names a checkpoint; empty where none does."""
    number = iteration_of(directory.name)
    return named.get(number, "") if number is not None or directory.name == RELEASE else ""


def _link_to(directory: AnyPath, links: Mapping[str, Path]) -> str:
    """The name of a link beside a directory that leads to it, or into it; empty where there is none."""
    local = store_of(directory).local
    if local is None:
        return ""
    place = Path(os.path.realpath(local.parent), local.name)
    return next((name for name, leads in links.items() if name != local.name and leads.is_relative_to(place)), "")


def _is_about_to_be_named(directory: AnyPath) -> bool:
    """Whether it was committed within the hour, and after the trackers were written: a save lets them name it next."""
    metadata = metadata_of(directory)
    published = [tracker.stat().st_mtime for tracker in trackers.present(directory.parent)]
    if metadata is None or not published or metadata.stat().st_mtime <= max(published):
        return False
    return is_fresh(metadata, now(directory.parent))


def _is_being_written(directory: AnyPath) -> bool:
    """Whether a save by marker goes on in it: on a file system it renews the directory's time."""
    others = marker.of_another(directory)
    if not others or store_of(directory).local is not None:
        return bool(others) and not is_stale(directory)
    time = now(directory.parent)
    return any(is_fresh(path, time) for path in others)


def _among_newest(directory: AnyPath, keep: int) -> str:
    """In words, that no `keep` checkpoints beside it that can be read are newer; empty where they are."""
    number = _number_of(directory.name)
    if keep < 1 or number is None:
        return ""
    newer = [one for one in iterations(directory.parent) if one.number > number]
    return "" if older([Iteration(number, directory, True), *newer], keep) else f"among the newest {keep}"


def prune(root: AnyPath, keep: int, also_keep: int | None = None) -> list[Iteration]:
    """Remove old checkpoints; one process calls this, after a newer one was committed.

    Args:
        root: Where the iteration directories are.
        keep: How many of the newest that can be read stay; one that cannot is never removed before they are there.
        also_keep: An iteration that stays whatever its age: the one that the user chose to resume from.

    Returns:
        What was removed.

    Raises:
        NotACheckpointError: A tracker is not legible.
    """
    for mark in entries(root, READING):
        if read_of(mark.name) and is_stale(mark):
            _let_go(mark)
    removed = []
    for iteration in prunable(root, keep, also_keep):
        try:
            if remove_unless_kept(iteration.directory, keep):
                removed.append(iteration)
        except OSError as error:  # one that stays keeps no other
            _log.warning("%s could not be removed: %s", iteration.directory, error)
    return removed


def prune_later(root: AnyPath, keep: int, also_keep: int | None = None) -> None:
    """Prune in the background: training goes on, whatever the storage says; see `prune`."""
    root = _itself(root)

    def prune_and_say() -> None:
        for iteration in prune(root, keep, also_keep):
            _log.info("removed %s", iteration.directory)

    removal.later(f"pruning {root}", prune_and_say)


def remove_later(directory: AnyPath) -> None:
    """Remove one checkpoint in the background; see `remove_unless_kept`."""
    directory = _itself(directory.parent) / directory.name
    removal.later(f"removing {directory}", lambda: remove_unless_kept(directory))


def _itself(directory: AnyPath) -> AnyPath:
    """A directory of a file system as it is called without links: one may lead elsewhere by and by."""
    local = store_of(directory).local
    return directory if local is None else Path(os.path.realpath(local))


def remove_unless_kept(directory: AnyPath, keep: int = 0, shown: object = None) -> bool:
    """Remove one checkpoint that nothing speaks for; whether it is gone.

    One that a save puts in its place meanwhile stays.

    Args:
        directory: The checkpoint.
        keep: How many of the newest stay.
        shown: The identity of the one that is meant, where somebody was asked about it.

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
    """Keep a checkpoint from being pruned; gives what to call from time to time as a heartbeat.

    The lease stands beside the directory itself, where it is reached through a link.  A reader who may not write there
    reads without protection.
    """
    directory = _itself(directory)
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
    return _is_read(directory, entries(directory.parent, READING))


def _is_read(directory: AnyPath, leases: Sequence[AnyPath]) -> bool:
    return not all(is_stale(lease) for lease in leases if read_of(lease.name) == directory.name)

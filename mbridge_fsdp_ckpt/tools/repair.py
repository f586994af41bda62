# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a root needs after saves that died, as a list of steps that have not been taken yet.

    move back   .replaced-iter_0000010-...    whose target is missing or empty: its last complete checkpoint
    write       the trackers                  where one is illegible or names nothing complete: what the other names,
                                              or else the newest complete and readable checkpoint
    delete      .staging-*, .deleted-*, .replaced-* whose target has metadata, objects of dead saves, stale .reading-*,
                Bridge's tracker where it cannot be written: it would contradict the other

Nothing that is committed is ever deleted, and trackers that mean a complete checkpoint are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from rich.filesize import decimal

from mbridge_fsdp_ckpt.commit import methods, trackers
from mbridge_fsdp_ckpt.commit.lease import is_stale
from mbridge_fsdp_ckpt.commit.retention import iterations
from mbridge_fsdp_ckpt.dcp.unpickler import files_named
from mbridge_fsdp_ckpt.errors import CheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.format.manifest import added_file, listed_files, read_manifest
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    MANIFEST_NAME,
    MAX_TRAIN_STATE_BYTES,
    READING,
    RELEASE,
    REPLACED,
    STATE_TRACKER,
    TRACKER,
    TRAIN_STATE,
    Files,
    iteration_name,
    iteration_of,
    read_of,
    suffix_of,
)
from mbridge_fsdp_ckpt.io.files import check_content, entries, is_plain_file, read_bounded, replace_file
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.tools.audit import Audit
from mbridge_fsdp_ckpt.tools.size_and_age import bytes_in, is_young


@dataclass(frozen=True, slots=True)
class Step:
    """One change.

    Args:
        action: "move back", "write" or "delete".
        path: What it is about.
        why: In words.
        take: Does it.
        is_due: Looks whether it is still to be done.
    """

    action: str
    path: AnyPath
    why: str = field(compare=False)
    take: Callable[[], object] = field(compare=False)
    is_due: Callable[[], bool] = field(compare=False, default=lambda: True)


@dataclass(slots=True)
class Plan:
    """Steps in the order in which to take them, what is left alone and why, and what cannot be helped.

    Args:
        steps: Not taken yet.
        left_alone: What, and why.
        broken: What, and why.
    """

    steps: list[Step] = field(default_factory=list)
    left_alone: list[tuple[AnyPath, str]] = field(default_factory=list)
    broken: list[tuple[AnyPath, str]] = field(default_factory=list)

    @property
    def deletes(self) -> list[Step]:
        """Steps that need a confirmation."""
        return [step for step in self.steps if step.action == "delete"]

    def carry_out(self) -> list[Step]:
        """Take the steps that are still to be taken, those that delete last; returns them in that order.

        A question may have waited for its answer: each step looks again at what it is about.
        """
        taken = [step for step in self.steps if step.action != "delete" and step.is_due()]
        for step in taken:
            step.take()
        for step in self.deletes:
            if step.is_due():
                step.take()
                taken.append(step)
        return taken


def plan_repair(root: AnyPath, *, force: bool) -> Plan:
    """What to do about a root; changes nothing.

    Args:
        root: A run's root.
        force: Whether leftovers go that are young enough to belong to a save in progress.

    Raises:
        OSError: The storage refused to tell what is there; an iteration that may not be looked into may be the newest.
    """
    plan = Plan()
    recovered = _plan_recovery(root, plan)
    _plan_tracker(root, plan, recovered)
    _plan_leftovers(root, plan, force=force)
    return plan


def _plan_recovery(root: AnyPath, plan: Plan) -> dict[str, AnyPath]:
    """Old directories that a dead commit put aside: their target's name, and where they lie now."""
    found: dict[str, AnyPath] = {}
    for name, place in methods.put_aside(root).items():
        target = root / name
        if has_metadata(target):
            continue
        is_free = not target.exists() or (target.is_dir() and next(target.iterdir(), None) is None)
        if store_of(target).is_link() or not is_free:
            plan.broken.append((place, f"the last checkpoint of {name}, which is now something else: move that away"))
            continue
        found[name] = place
        why = f"{name} is {'empty' if target.exists() else 'missing'}: its save died between two renames"
        is_due = partial(_lies_aside, target, place)
        plan.steps.append(Step("move back", place, why, partial(methods.recover, target), is_due))
    return found


def _lies_aside(target: AnyPath, place: AnyPath) -> bool:
    return methods.put_aside(target.parent).get(target.name) == place and not has_metadata(target)


def _plan_tracker(root: AnyPath, plan: Plan, recovered: dict[str, AnyPath]) -> None:
    complete = [one for one in iterations(root) if has_metadata(one.directory)]  # or it raises: see `plan_repair`
    places = {iteration_name(one.number): one.directory for one in complete}
    places |= {RELEASE: root / RELEASE} if has_metadata(root / RELEASE) else {}
    places |= {name: aside for name, aside in recovered.items() if has_metadata(aside)}
    named, trouble = {}, {}
    if folders := [tracker for tracker in trackers.present(root) if tracker.is_dir()]:
        plan.broken.extend((folder, "a directory, not a tracker: move it away") for folder in folders)
        return
    for name in (STATE_TRACKER, TRACKER):
        found, wrong = _said_by(root / name)
        if wrong:
            trouble[name] = wrong
        elif found in places:
            named[name] = found
        elif found:
            is_there = "not complete" if (root / found).is_dir() else "not there"
            trouble[name] = f"names {found}, which is {is_there}"
    if TRACKER not in named | trouble:
        trouble[TRACKER] = "missing"
    if not trouble:
        _note_contradiction(root, plan, places)
    elif named:
        [(tracker, name)] = named.items()
        _note_damage(plan, root / tracker, name, places[name])
        _plan_naming(root, plan, name, places[name], trouble, f"{tracker} names {name}")
    else:
        _plan_newest(root, plan, places, trouble)


def _said_by(tracker: AnyPath) -> tuple[str, str]:
    """The checkpoint that a tracker names, and what is wrong with it; both are empty where it is not there."""
    try:
        found = trackers.read(tracker)
    except NotACheckpointError as error:
        return "", f"illegible: {error.found}"
    return "" if found is None else found.name, ""


def _plan_newest(root: AnyPath, plan: Plan, places: dict[str, AnyPath], trouble: dict[str, str]) -> None:
    """Where no tracker names anything complete."""
    numbered = sorted((number, name) for name in places if (number := iteration_of(name)) is not None)
    if not numbered:
        illegible = [name for name in trouble if trouble[name] != "missing"]
        why = "and there is no complete checkpoint to name"
        plan.broken.extend((root / name, f"{trouble[name]}, {why}") for name in illegible)
        return
    for _, name in reversed(numbered):
        damage = unreadable(places[name])
        if not damage:
            why = f"{name} is the newest complete and readable checkpoint"
            _plan_naming(root, plan, name, places[name], trouble, why)
            return
        plan.left_alone.append((root / name, f"not readable: {damage}"))
    plan.broken.append((root / TRACKER, f"{trouble[TRACKER]}, and no checkpoint is readable"))


def _note_contradiction(root: AnyPath, plan: Plan, places: dict[str, AnyPath]) -> None:
    """Say so where trackers contradict each other: which is meant is for people."""
    try:
        meant = trackers.meant(root)
    except NotACheckpointError as error:
        plan.broken.append((root / STATE_TRACKER, f"names {error.found}: delete the one that is wrong"))
    else:
        assert meant is not None
        _note_damage(plan, meant.tracker, meant.name, places[meant.name])


def _note_damage(plan: Plan, tracker: AnyPath, name: str, place: AnyPath) -> None:
    """Say so where a tracker names something complete that a load would refuse; whether to go back is for people."""
    damage = unreadable(place)
    if damage:
        plan.left_alone.append((tracker, f"names {name}, which is complete but not readable: {damage}"))


def unreadable(directory: AnyPath) -> str:
    """Why a load would refuse a checkpoint, from structure and sizes; empty where it would not."""
    try:
        if (directory / MANIFEST_NAME).exists():
            for finding in Audit(directory, content=False, workers=1).findings():
                return f"{finding.file}: expected {finding.expected}, found {finding.found}"
            return ""
        source = open_checkpoint(directory)
        source.chunks(source.metadata.keys)
    except CheckpointError as error:
        return f"expected {error.expected}, found {error.found}"
    return ""


def _plan_naming(root: AnyPath, plan: Plan, name: str, place: AnyPath, trouble: dict[str, str], since: str) -> None:
    """Let both trackers name a checkpoint."""
    directory = root / name if place.name.startswith(REPLACED) else place
    state, copy, tracker = _train_state(place), root / STATE_TRACKER, root / TRACKER
    said = _said_by(copy), _said_by(tracker)

    def is_due() -> bool:
        return (_said_by(copy), _said_by(tracker)) == said and has_metadata(place)

    def contradicts() -> bool:
        return (_said_by(copy), _said_by(tracker)) == (said[0], (name, ""))

    if is_plain_file(state):
        take = partial(_copy_train_state, directory, copy)
        plan.steps.append(Step("write", copy, f"a copy of {directory.name}/{TRAIN_STATE}", take, is_due))
    elif STATE_TRACKER in trouble:
        why = f"{trouble[STATE_TRACKER]}, and {directory.name} has no {TRAIN_STATE}"
        plan.steps.append(Step("delete", copy, why, partial(_delete, copy), contradicts))
    why = trouble.get(TRACKER) or f"{STATE_TRACKER} {trouble[STATE_TRACKER]}"
    take = partial(replace_file, tracker, trackers.content(iteration_of(name)))
    plan.steps.append(Step("write", tracker, f"{why}; {since}", take, is_due))


def _train_state(directory: AnyPath) -> AnyPath:
    """Where a checkpoint's train state lies; whatever its metadata is like, a plan can be made."""
    try:
        return added_file(directory, TRAIN_STATE)
    except CheckpointError:
        return directory / TRAIN_STATE


def _copy_train_state(directory: AnyPath, copy: AnyPath) -> None:
    state = directory / TRAIN_STATE
    if (directory / MANIFEST_NAME).exists():
        metadata = read_manifest(directory)
        state = directory / Files(metadata.save, metadata.suffix).added(TRAIN_STATE)
        for entry in listed_files(metadata):
            if directory / entry.name == state:
                check_content(directory, entry)
    replace_file(copy, read_bounded(state, MAX_TRAIN_STATE_BYTES))


def _plan_leftovers(root: AnyPath, plan: Plan, *, force: bool) -> None:
    looks: dict[str, tuple[bool, set[str] | None, Callable[[], bool]]] = {}
    for path in methods.leftovers(root):
        within = path.relative_to(str(root)).parts
        place = root / within[0]  # one object may be old while a save goes on beside it
        if place.name not in looks:  # it is looked at once more, before the first of its objects goes
            again = cache(partial(_is_left, place, force=force))
            looks[place.name] = is_young(place), _in_stock_s_view(place), again
        young, viewed, once = looks[place.name]
        if path != place and (viewed is None or suffix_of("/".join(within[1:])) in viewed):
            plan.left_alone.append((path, f"{DCP_METADATA} beside it names that save's files: {MANIFEST_NAME} is lost"))
        elif young and not force:
            plan.left_alone.append((path, "touched within the last hour: a save may be in progress (--force)"))
        else:
            why = f"left by a save or a removal that died, {decimal(bytes_in(path))}"
            is_due = partial(_is_left_now, path, place, once)
            plan.steps.append(Step("delete", path, why, partial(methods.discard, path), is_due))
    marks: list[AnyPath] = [mark for mark in entries(root, READING) if read_of(mark.name)]
    for mark in sorted(marks, key=lambda path: path.name):
        if is_young(mark):
            plan.left_alone.append((mark, "somebody reads that checkpoint"))
        else:
            why = "left by a reader that gave no heartbeat for an hour"
            plan.steps.append(Step("delete", mark, why, partial(_delete, mark), partial(is_stale, mark)))


def _in_stock_s_view(directory: AnyPath) -> set[str] | None:
    """Whose files `.metadata` names, where it has lost the manifest beside it; None where it does not tell."""
    if (directory / MANIFEST_NAME).exists() or not (directory / DCP_METADATA).exists():
        return set()
    try:
        return {suffix_of(name) for name in files_named(directory)}
    except CheckpointError:
        return None


def _is_left(place: AnyPath, *, force: bool) -> bool:
    """Whether an entry of a root is still a leftover, or has objects of dead saves, and nobody works in it."""
    is_ours = place.name.startswith(".")
    is_dead = methods.is_leftover(place) if is_ours else place.is_dir() and not (place / MANIFEST_NAME).exists()
    return is_dead and not store_of(place).is_link() and (force or not is_young(place))


def _is_left_now(path: AnyPath, place: AnyPath, once: Callable[[], bool]) -> bool:
    """The same of a place itself, or of an object in it: its save may commit while others are deleted."""
    return once() and (path == place or not (place / MANIFEST_NAME).exists())


def _delete(path: AnyPath) -> None:
    """Delete a file; whoever was faster has done the same."""
    store_of(path).remove()

"""What a root needs after saves that died, as a list of steps that have not been taken yet.

    move back   .replaced-iter_0000010-...    whose target is missing or empty: its last complete checkpoint
    write       the tracker                   where it is missing, illegible, or names nothing complete
    delete      .staging-*, .deleted-*, .replaced-* whose target has a head, objects of dead saves, stale .reading-*

Nothing that is committed is ever deleted, and a tracker that names a complete checkpoint is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rich.filesize import decimal

from mbridge_fsdp_ckpt.bridge.names import MAX_TRAIN_STATE_BYTES, TRAIN_STATE, TRAIN_STATE_TRACKER
from mbridge_fsdp_ckpt.care.audit import Audit
from mbridge_fsdp_ckpt.care.size_and_age import bytes_in, is_young
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.hosts.root import RELEASE, TRACKER, tracked
from mbridge_fsdp_ckpt.storage.commit import methods
from mbridge_fsdp_ckpt.storage.commit.retention import iterations
from mbridge_fsdp_ckpt.storage.files import check_content, entries, is_plain_file, read_bounded, replace_file
from mbridge_fsdp_ckpt.storage.format.head import has_head
from mbridge_fsdp_ckpt.storage.format.manifest import read_manifest
from mbridge_fsdp_ckpt.storage.format.names import (
    MANIFEST_NAME,
    READING,
    REPLACED,
    is_reading,
    iteration_name,
    iteration_of,
)
from mbridge_fsdp_ckpt.storage.opening import open_checkpoint
from mbridge_fsdp_ckpt.storage.store import AnyPath, store_of


@dataclass(frozen=True, slots=True)
class Step:
    """One change.

    Args:
        action: "move back", "write" or "delete".
        path: What it is about.
        why: In words.
        take: Does it.
    """

    action: str
    path: AnyPath
    why: str
    take: Callable[[], object]


@dataclass(slots=True)
class Plan:
    """Steps in the order in which to take them, what is left alone and why, and what cannot be helped."""

    steps: list[Step] = field(default_factory=list)
    left_alone: list[tuple[AnyPath, str]] = field(default_factory=list)
    broken: list[tuple[AnyPath, str]] = field(default_factory=list)

    @property
    def deletes(self) -> list[Step]:
        """Steps that need a confirmation."""
        return [step for step in self.steps if step.action == "delete"]

    def carry_out(self) -> list[Step]:
        """Take the steps, those that delete last; returns them in that order."""
        taken = [step for step in self.steps if step.action != "delete"] + self.deletes
        for step in taken:
            step.take()
        return taken


def plan_repair(root: AnyPath, *, force: bool) -> Plan:
    """What to do about a root; changes nothing.

    Args:
        root: A run's root.
        force: Whether leftovers go that are young enough to belong to a save in progress.
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
        if has_head(target):
            continue
        is_free = not target.exists() or (target.is_dir() and next(target.iterdir(), None) is None)
        if store_of(target).is_link() or not is_free:
            plan.broken.append((place, f"the last checkpoint of {name}, which is now something else: move that away"))
            continue
        found[name] = place
        why = f"{name} is {'empty' if target.exists() else 'missing'}: its save died between two renames"
        plan.steps.append(Step("move back", place, why, partial(methods.recover, target)))
    return found


def _plan_tracker(root: AnyPath, plan: Plan, recovered: dict[str, AnyPath]) -> None:
    text, tracker = tracked(root), root / TRACKER
    places = {iteration.number: iteration.directory for iteration in iterations(root) if iteration.complete}
    for name, aside in recovered.items():
        number = iteration_of(name)
        if number is not None and has_head(aside):
            places[number] = aside
    trouble = _trouble(root, text, places, RELEASE in recovered)
    if not trouble:
        _note_damage(plan, tracker, text, places)
        return
    if not places:
        if text is not None:
            plan.broken.append((tracker, f"{trouble}, and there is no complete checkpoint to name"))
        return
    for number in sorted(places, reverse=True):
        damage = unreadable(places[number])
        if not damage:
            _plan_naming(root, plan, number, places[number], trouble)
            return
        plan.left_alone.append((root / iteration_name(number), f"not readable: {damage}"))
    plan.broken.append((tracker, f"{trouble}, and no checkpoint is readable"))


def _trouble(root: AnyPath, text: str | None, places: dict[int, AnyPath], release_recovered: bool) -> str:
    """What is wrong with the tracker; empty where nothing is."""
    if text is None:
        return "missing"
    if text == RELEASE:
        return "" if release_recovered or has_head(root / RELEASE) else "names release, which is not complete"
    if not (text.isascii() and text.isdecimal()):
        return f"illegible: {text!r}"
    number = int(text)
    if number in places:
        return ""
    directory = root / iteration_name(number)
    return f"names {directory.name}, which is {'not complete' if directory.is_dir() else 'not there'}"


def _note_damage(plan: Plan, tracker: AnyPath, text: str | None, places: dict[int, AnyPath]) -> None:
    """Say so where the tracker names something complete that a load would refuse; whether to go back is for people."""
    if text is None or text == RELEASE:
        return
    damage = unreadable(places[int(text)])
    if damage:
        plan.left_alone.append((tracker, f"names iteration {text}, which is complete but not readable: {damage}"))


def unreadable(directory: AnyPath) -> str:
    """Why a load would refuse a checkpoint, from structure and sizes; empty where it would not."""
    try:
        if (directory / MANIFEST_NAME).exists():
            for finding in Audit(directory, content=False, workers=1).findings():
                return f"{finding.file}: expected {finding.expected}, found {finding.found}"
            return ""
        source = open_checkpoint(directory)
        source.chunks(source.head.keys)
    except CheckpointError as error:
        return f"expected {error.expected}, found {error.found}"
    return ""


def _plan_naming(root: AnyPath, plan: Plan, number: int, place: AnyPath, trouble: str) -> None:
    directory = root / iteration_name(number)
    directory = directory if place.name.startswith(REPLACED) else place
    state, copy = place / TRAIN_STATE, root / TRAIN_STATE_TRACKER
    if is_plain_file(state):
        take = partial(_copy_train_state, directory, copy)
        plan.steps.append(Step("write", copy, f"a copy of {directory.name}/{TRAIN_STATE}", take))
    elif copy.is_file():
        plan.left_alone.append((copy, f"may belong to another iteration: {directory.name} has no {TRAIN_STATE}"))
    why = f"{trouble}; {directory.name} is the newest complete and readable checkpoint"
    plan.steps.append(Step("write", root / TRACKER, why, partial(replace_file, root / TRACKER, str(number).encode())))


def _copy_train_state(directory: AnyPath, copy: AnyPath) -> None:
    if (directory / MANIFEST_NAME).exists():
        for entry in read_manifest(directory).files:
            if entry.name == TRAIN_STATE:
                check_content(directory, entry)
    replace_file(copy, read_bounded(directory / TRAIN_STATE, MAX_TRAIN_STATE_BYTES))


def _plan_leftovers(root: AnyPath, plan: Plan, *, force: bool) -> None:
    young: dict[str, bool] = {}
    for path in methods.leftovers(root):
        place = path if path.is_dir() else path.parent  # one object may be old while a save goes on beside it
        if str(place) not in young:
            young[str(place)] = is_young(place)
        if young[str(place)] and not force:
            plan.left_alone.append((path, "touched within the last hour: a save may be in progress (--force)"))
        else:
            why = f"left by a save or a removal that died, {decimal(bytes_in(path))}"
            plan.steps.append(Step("delete", path, why, partial(_delete, path)))
    marks: list[AnyPath] = [mark for mark in entries(root, READING) if is_reading(mark.name)]
    for mark in sorted(marks, key=lambda path: path.name):
        if is_young(mark):
            plan.left_alone.append((mark, "somebody reads that checkpoint"))
        else:
            why = "left by a reader that gave no sign of life for an hour"
            plan.steps.append(Step("delete", mark, why, partial(_delete, mark)))


def _delete(path: AnyPath) -> None:
    """Delete a leftover; whoever was faster has done the same."""
    local = store_of(path).local
    if local is not None and local.is_dir():
        shutil.rmtree(local)
    else:
        store_of(path).remove()

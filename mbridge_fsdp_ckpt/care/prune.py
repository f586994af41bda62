"""Pruning a root: which old checkpoints go, and why the others stay."""

from __future__ import annotations

from dataclasses import dataclass

from mbridge_fsdp_ckpt.care.size_and_age import bytes_in
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.hosts.root import RELEASE, TRACKER, tracked
from mbridge_fsdp_ckpt.storage.commit.methods import remove
from mbridge_fsdp_ckpt.storage.commit.retention import Iteration, iterations, keeps, prunable
from mbridge_fsdp_ckpt.storage.store import AnyPath


@dataclass(frozen=True, slots=True)
class Pruning:
    """What goes, with its bytes, and why each other directory stays.  Nothing has been removed yet.

    Args:
        root: A run's root.
        keep: How many of the newest complete checkpoints stay.
        doomed: What goes, with its bytes.
        kept: Names of the others, with the reason.
    """

    root: AnyPath
    keep: int
    doomed: dict[Iteration, int]
    kept: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes that go."""
        return sum(self.doomed.values())

    def carry_out(self) -> dict[Iteration, int]:
        """Remove what was shown, and is still to go: time has passed since.  Returns what went, with its bytes.

        Raises:
            NotACheckpointError: The tracker is no longer legible.
        """
        removed = {}
        for iteration, size in self.doomed.items():
            if iteration in prunable(self.root, self.keep, _named(self.root)):
                remove(iteration.directory)
                removed[iteration] = size
        return removed


def plan_pruning(root: AnyPath, keep: int) -> Pruning:
    """What would go; changes nothing.

    Raises:
        NotACheckpointError: The tracker is not legible: what must stay is not known.
    """
    named = _named(root)
    doomed = {iteration: bytes_in(iteration.directory) for iteration in prunable(root, keep, named)}
    return Pruning(root, keep, doomed, _kept(root, keep, named, doomed))


def _named(root: AnyPath) -> int | None:
    """The iteration that the tracker names.

    Raises:
        NotACheckpointError: It is not legible: what must stay is not known.
    """
    text = tracked(root)
    if text is None or text == RELEASE:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise NotACheckpointError(
            expected="an iteration number in the tracker file",
            found=repr(text),
            remedy=f"Nothing was removed. Rebuild the tracker first: mbridge_fsdp_ckpt repair {root}",
            key=str(root / TRACKER),
        )
    return int(text)


def _kept(root: AnyPath, keep: int, named: int | None, doomed: dict[Iteration, int]) -> dict[str, str]:
    """Why each other directory stays."""
    there = iterations(root)
    newest = [iteration for iteration in there if iteration.complete][-keep:]
    reasons = {}
    for iteration in there:
        if iteration in doomed:
            continue
        if not iteration.complete:
            reason = "incomplete: no head, or being written"
        elif iteration.number == named:
            reason = "the tracker names it"
        elif iteration in newest:
            reason = f"among the newest {keep}"
        else:
            reason = keeps(iteration.directory) or "newer than it was"
        reasons[iteration.directory.name] = reason
    return reasons

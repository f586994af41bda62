"""Pruning a root: which old checkpoints go, and why the others stay."""

from __future__ import annotations

from dataclasses import dataclass

from mbridge_fsdp_ckpt.care.size_and_age import bytes_in
from mbridge_fsdp_ckpt.storage.commit import trackers
from mbridge_fsdp_ckpt.storage.commit.retention import (
    Iteration,
    iterations,
    keeps,
    named_by,
    prunable,
    remove_unless_kept,
)
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
            still = iteration in prunable(self.root, self.keep)
            if still and remove_unless_kept(iteration.directory):
                removed[iteration] = size
        return removed


def plan_pruning(root: AnyPath, keep: int) -> Pruning:
    """What would go; changes nothing.

    Raises:
        NotACheckpointError: The tracker is not legible: what must stay is not known.
    """
    trackers.every_named(root)  # illegible ones are an error also where nothing is old enough to go
    doomed = {iteration: bytes_in(iteration.directory) for iteration in prunable(root, keep)}
    return Pruning(root, keep, doomed, _kept(root, keep, doomed))


def _kept(root: AnyPath, keep: int, doomed: dict[Iteration, int]) -> dict[str, str]:
    """Why each other directory stays."""
    there = iterations(root)
    newest = [iteration for iteration in there if iteration.complete][-keep:]
    reasons = {}
    for iteration in there:
        if iteration in doomed:
            continue
        if not iteration.complete:
            reason = "incomplete: no head, or being written"
        elif iteration in newest and not named_by(iteration.directory):
            reason = f"among the newest {keep}"
        else:
            reason = keeps(iteration.directory) or "newer than it was"
        reasons[iteration.directory.name] = reason
    return reasons

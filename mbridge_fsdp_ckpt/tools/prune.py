# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Pruning a root: which old checkpoints go, and why the others stay."""

from __future__ import annotations

from dataclasses import dataclass

from mbridge_fsdp_ckpt.commit import methods
from mbridge_fsdp_ckpt.commit.readable import defect
from mbridge_fsdp_ckpt.commit.retention import (
    Iteration,
    Look,
    iterations,
    keeps,
    look,
    named_by,
    older,
    prunable,
    remove_unless_kept,
)
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.tools.size_and_age import bytes_in


@dataclass(frozen=True, slots=True)
class Pruning:
    """What goes, with its bytes, and why each other directory stays.  Nothing has been removed yet.

    Args:
        root: A run's root.
        keep: How many of the newest complete checkpoints stay.
        doomed: What goes, with its bytes.
        kept: Names of the others, with the reason.
        shown: The identity of what goes.
    """

    root: AnyPath
    keep: int
    doomed: dict[Iteration, int]
    kept: dict[str, str]
    shown: dict[Iteration, object]

    @property
    def size(self) -> int:
        """Bytes that go."""
        return sum(self.doomed.values())

    def carry_out(self) -> dict[Iteration, int]:
        """Remove what was shown, and is still to go: time has passed since.  Returns what went, with its bytes.

        Raises:
            NotACheckpointError: The tracker is no longer legible.
            OSError: The storage refused to remove one; the others are gone.
        """
        removed, refused = {}, []
        for iteration, size in self.doomed.items():
            try:
                if remove_unless_kept(iteration.directory, self.keep, self.shown[iteration]):
                    removed[iteration] = size
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return removed


def plan_pruning(root: AnyPath, keep: int) -> Pruning:
    """What would go; changes nothing.

    Raises:
        NotACheckpointError: The tracker is not legible: what must stay is not known.
    """
    seen = look(root)  # illegible trackers are an error also where nothing is old enough to go
    doomed = {iteration: bytes_in(iteration.directory) for iteration in prunable(root, keep)}
    shown = {iteration: methods.identity(iteration.directory) for iteration in doomed}
    return Pruning(root, keep, doomed, _kept(root, keep, doomed, seen), shown)


def _kept(root: AnyPath, keep: int, doomed: dict[Iteration, int], seen: Look) -> dict[str, str]:
    """Why each other directory stays."""
    there = iterations(root)
    old = older(there, keep)
    reasons = {}
    for iteration in there:
        if iteration in doomed:
            continue
        if not iteration.complete:
            reason = "incomplete: no metadata, or being written"
        elif iteration not in old and not named_by(iteration.directory, seen.named):
            wrong = defect(iteration.directory)
            reason = f"not counted, since it cannot be read: {wrong}" if wrong else f"among the newest {keep}"
        else:
            reason = keeps(iteration.directory, seen=seen) or "newer than it was"
        reasons[iteration.directory.name] = reason
    return reasons

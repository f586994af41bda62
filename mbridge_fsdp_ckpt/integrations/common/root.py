# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The root of a run's checkpoints: the iteration directory that is meant, and that is there, for all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.commit.methods import recover
from mbridge_fsdp_ckpt.coordination.coordination import next_coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.errors import CheckpointError, NotACheckpointError
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import ITERATION, iteration_name
from mbridge_fsdp_ckpt.io.files import entries, what_is_there
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.settings import Settings

_LISTED = 8  # iterations that an error names: the newest
_VERLS = "global_step_"
_TENSORS = ("actor/model/dist_ckpt", "model/dist_ckpt")  # of an actor, of the SFT trainer
_DOING = "looking for the checkpoint to load"
_VIEWS = 4  # different things that ranks see, of which an error tells


def same_on_all_ranks[T](look: Callable[[], T], describe: Callable[[T], str], settings: Settings) -> T:
    """What a rank finds where checkpoints lie, if all ranks find the same.

    Each host looks for itself, and one whose file system shows an older state would begin at random weights while the
    others wait for it to load.

    Args:
        look: Called on each rank; returns what the rank finds.
        describe: Turns that into a text, which ranks compare.
        settings: Their limits count.

    Raises:
        NotACheckpointError: Ranks find different things; the same on every rank.
        CheckpointError: What `look` raised on some rank; the same on every rank.
    """
    coordination = next_coordination(_SameView.phase, settings.time_limit, settings.storage_limit)
    with coordination.at_work():
        found = Outcome.of(look, coordination.rank, _DOING)
        view = found.then(lambda own: [(describe(own), coordination.rank)], coordination.rank, _DOING)
    coordination.meet(_SameView(view.brought))
    coordination.end()
    return found.value


type _Views = list[tuple[str, int]]
"""What ranks see, each view with the first rank that has it."""


@dataclass(frozen=True, slots=True)
class _SameView(Round[_Views, None]):
    """A meeting in which all ranks check that they find the same."""

    view: _Views | CheckpointError
    phase = "finding the checkpoint to load"

    def message(self) -> _Views | CheckpointError:
        """The text of what this rank finds."""
        return self.view

    def combine(self, messages: list[_Views]) -> _Views:
        """The different texts of several ranks, up to a bound."""
        first: dict[str, int] = {}
        for view, rank in (each for found in messages for each in found):
            first[view] = min(rank, first.get(view, rank))
        return sorted(first.items(), key=lambda each: each[1])[:_VIEWS]

    def decide(self, whole: _Views) -> None:
        """Refuse more than one view."""
        if len(whole) > 1:
            raise NotACheckpointError(
                expected="all ranks to find the same checkpoint to load",
                found="; ".join(f"on rank {rank} {view}" for view, rank in whole),
                remedy="Check that the path leads to the same shared directory on every host, and start again once "
                "each host's file system shows its present state.",
            )


def find_checkpoint(path: AnyPath) -> AnyPath:
    """The iteration directory: the path itself, or the one that the trackers of a run's root mean.

    Returns:
        The path itself also where there is no tracker.

    Raises:
        NotACheckpointError: What a tracker names is not there, or it is not legible: see `commit.trackers`.
    """
    if has_metadata(path):
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
        option: The option with which the user chose it.

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
        remedy = remedy if there else _in_verls(root) or remedy
        raise NotACheckpointError(
            expected=f"{name}, which {named_by} names",
            found=", ".join(there[-_LISTED:]) or f"no iteration directory; {what_is_there(root)}",
            remedy=remedy,
            key=str(root),
        )
    return directory


def _in_verls(root: AnyPath) -> str:
    """What to give of a root of VeRL's, whose tracker has the same name; empty where it is none."""
    steps = sorted(entries(root, _VERLS), key=lambda path: (len(path.name), path.name))
    if not steps:
        return ""
    below = next((place for place in _TENSORS if (steps[-1] / place).is_dir()), _TENSORS[0])
    return f"It is a root of VeRL's: give the directory that has the tensors, such as {steps[-1].name}/{below}."

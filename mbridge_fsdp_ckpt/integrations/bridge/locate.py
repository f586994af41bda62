# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The iteration directory that a run resumes from: Bridge says where checkpoints may lie, trackers which one counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.bridge.training.utils import checkpoint_utils as names

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import RELEASE, iteration_of
from mbridge_fsdp_ckpt.integrations.bridge import differences
from mbridge_fsdp_ckpt.integrations.bridge.run_config import RunConfig
from mbridge_fsdp_ckpt.integrations.common.root import chosen, existing, same_on_all_ranks
from mbridge_fsdp_ckpt.io.files import what_is_there
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path
from mbridge_fsdp_ckpt.settings import Settings

_OPTION = "checkpoint.ckpt_step"


@dataclass(frozen=True, slots=True)
class Located:
    """An iteration directory.

    Args:
        directory: The directory.
        persistent_root: Where the data loader's position was saved: the root of persistent checkpoints.
        release: Whether its name says that it holds weights without training progress.
        hugging_face: Whether it is none of an iteration, but a model of Hugging Face's, which Bridge reads.
        optimizer: Whether its run saved optimizer state, where Bridge asks for that; see `differences`.
    """

    directory: AnyPath
    persistent_root: AnyPath
    release: bool = False
    hugging_face: bool = False
    optimizer: bool = True


def locate(load_dir: str | None, checkpoint_config: Any, step: int | None) -> Located | None:
    """The directory to load: the given one if it is an iteration directory, the given step's, or the last one.

    The last one is what trackers mean, of the root or of Bridge's places for recovery (non-persistent) checkpoints.

    Args:
        load_dir: Root or iteration directory.
        checkpoint_config: Bridge's checkpoint configuration.
        step: The user's choice of iteration (`ckpt_step`); it goes before recovery checkpoints.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        NotACheckpointError: The chosen step, or the one that a tracker names, is not there, or a tracker is illegible.
    """
    if load_dir is not None:
        root = as_path(load_dir)
        if iteration_of(root.name) is not None and not root.exists():
            existing(root.parent, root.name, "the path", "Check the path.")
        if has_metadata(root) or names.is_checkpoint_iteration_directory(load_dir):
            _check_named_so(root, step)
            return Located(root, root.parent, release=root.name == RELEASE)
        if step is not None:
            return Located(chosen(root, step, _OPTION), root)
    resumes = load_dir == checkpoint_config.load  # recovery checkpoints of a run are nothing to fine-tune from
    recovery = differences.recovery_directories(load_dir, checkpoint_config) if resumes else ()
    roots = [as_path(place) for place in recovery]
    roots += [] if load_dir is None else [as_path(load_dir)]
    found = [(named, root) for root in roots if (named := trackers.meant(root)) is not None]
    if not found:
        return None
    named, root = max(found, key=lambda one: -1 if one[0].number is None else one[0].number)  # as Bridge: the first
    directory = existing(root, named.name, named.tracker.name, f"Choose one that is there with {_OPTION}.")
    return Located(directory, _persistent_root(root, load_dir, checkpoint_config), release=named.number is None)


def located(load_dir: str, checkpoint_config: Any, step: int | None, settings: Settings) -> Located | None:
    """Call `locate` on all ranks, and check that they find the same; an error of one rank is raised on all.

    All that the way of loading depends on is looked at here: where ranks went different ways, some would wait.
    """

    def look() -> Located | None:
        if differences.is_hugging_face(load_dir):
            return Located(as_path(load_dir), as_path(load_dir), hugging_face=True)
        found = locate(load_dir, checkpoint_config, step)
        if found is None or not differences.starts_with_fresh_optimizer():
            return found
        return replace(found, optimizer=RunConfig.read(found.directory).saves_optimizer)

    return same_on_all_ranks(look, lambda found: _described(found, load_dir), settings)


def _check_named_so(directory: AnyPath, step: int | None) -> None:
    number = iteration_of(directory.name)
    if step is not None and number is not None and number != step:
        raise NotACheckpointError(
            expected=f"iteration {step}, which {_OPTION} names",
            found="a directory of another iteration",
            remedy=f"Leave out {_OPTION}, or give the root of that iteration's checkpoints.",
            key=str(directory),
        )


def _persistent_root(root: AnyPath, load_dir: str | None, checkpoint_config: Any) -> AnyPath:
    """The root of persistent checkpoints that a root, maybe one of recovery checkpoints, belongs to."""
    if load_dir is not None and as_path(load_dir) in (root, root.parent):
        return as_path(load_dir)
    return root if checkpoint_config.save is None else as_path(checkpoint_config.save)


def check_there(checkpoint_config: Any, settings: Settings, *, adapters: bool = False) -> None:
    """Check, before a model is built, that a run does not begin anew where its options ask to resume.

    Bridge's set-up asks for no load where it sees no tracker, and then trains from random weights, whatever
    `exit_on_missing_checkpoint` and `ckpt_step` say.

    Args:
        checkpoint_config: Bridge's checkpoint configuration.
        settings: The settings whose time limits apply.
        adapters: Whether adapters are trained: those in `load` alone are resumed from, not their pretrained base.

    Raises:
        NotACheckpointError: There is nothing to resume from, or not which checkpoint, or set-up would not see it, or
            ranks see different things.  The same on every rank.
    """
    load, pretrained = checkpoint_config.load, checkpoint_config.pretrained_checkpoint
    if load is None and pretrained is None and checkpoint_config.non_persistent_ckpt_type is None:
        return
    same_on_all_ranks(lambda: _check_seen(checkpoint_config, adapters=adapters), str, settings)


def _check_seen(checkpoint_config: Any, *, adapters: bool) -> str:
    """Check one rank's view for `check_there`; returns the view as a text that ranks compare."""
    load, pretrained = checkpoint_config.load, checkpoint_config.pretrained_checkpoint
    found = None
    if load is None or not differences.is_hugging_face(load):
        base = None if adapters else pretrained
        found = locate(load, checkpoint_config, _step_in(load, base, checkpoint_config.ckpt_step))
    if found is None:
        if load is not None or (pretrained is not None and not adapters):
            _check_begins_with_one(checkpoint_config, adapters=adapters)
    elif load is not None and not (
        names.checkpoint_exists(load) or differences.has_recovery_checkpoint(load, checkpoint_config)
    ):
        raise NotACheckpointError(
            expected="a tracker in checkpoint.load, without which Bridge's set-up would begin with random weights",
            found=what_is_there(as_path(load)),
            remedy=f"Set checkpoint.load={found.directory}.",
            key=load,
        )
    there = [place for place in (load, pretrained) if _is_checkpoint(place)]
    return f"{_described(found, load)}, and something to load in {', '.join(there) or 'neither place'}"


def _check_begins_with_one(checkpoint_config: Any, *, adapters: bool) -> None:
    """Fresh adapters may begin where the run itself saves, as in Bridge: their base has to be there anyway."""
    load, pretrained = checkpoint_config.load, checkpoint_config.pretrained_checkpoint
    places = [as_path(place) for place in (load, checkpoint_config.save) if place is not None]
    if adapters and len(places) == 2 and places[0] == places[1]:
        return
    if not _is_checkpoint(load) and (adapters or not _is_checkpoint(pretrained)):
        check_may_be_missing(load, checkpoint_config, adapters=adapters)


def _described(found: Located | None, load: str | None) -> str:
    """What a rank found, as a text that ranks compare."""
    if found is not None:
        kind = "Hugging Face's " if found.hugging_face else ""
        return f"{kind}{found.directory}{'' if found.optimizer else ' without optimizer state'}"
    return "no checkpoint" if load is None else f"no checkpoint in {load}"  # other files there are nobody's business


def _step_in(load: str | None, pretrained: str | None, step: int | None) -> int | None:
    """The chosen step, unless Bridge's load will look for it in the pretrained checkpoint's root."""
    if step is None or pretrained is None or names.checkpoint_exists(load):
        return step
    return None if as_path(names.get_checkpoint_name(pretrained, step)).is_dir() else step


def _is_checkpoint(place: str | None) -> bool:
    return place is not None and (names.checkpoint_exists(place) or differences.is_hugging_face(place))


def check_may_be_missing(load: str | None, checkpoint_config: Any, *, adapters: bool = False) -> None:
    """Refuse to continue without a checkpoint if the configuration asks for that.

    Args:
        load: The place in which a checkpoint was looked for.
        checkpoint_config: Bridge's checkpoint configuration.
        adapters: Whether it would have to be one of adapters.

    Raises:
        NotACheckpointError: `exit_on_missing_checkpoint` is set.
    """
    if not checkpoint_config.exit_on_missing_checkpoint:
        return
    base = None if adapters else checkpoint_config.pretrained_checkpoint
    places = {"checkpoint.load": load, "checkpoint.pretrained_checkpoint": base}
    given = {name: place for name, place in places.items() if place is not None}
    wanted = f"a checkpoint{' of adapters' if adapters else ''} in {' or '.join(given or places)}"
    raise NotACheckpointError(
        expected=f"{wanted}, since checkpoint.exit_on_missing_checkpoint is set",
        found="; ".join(f"{place}: {what_is_there(as_path(place))}" for place in given.values()) or "neither is set",
        remedy="Check the path, or set exit_on_missing_checkpoint=False to begin with "
        f"{'fresh adapters' if adapters else 'random weights'}.",
    )

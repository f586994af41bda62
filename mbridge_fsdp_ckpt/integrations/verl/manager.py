# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What VeRL's checkpoint manager saves and loads, by its `save_contents` and `load_contents`.

    model       main weights and buffers
    optimizer   every slot, hyperparameters, the schedule's state, the loss scale
    extra       random-number states of each rank
    hf_model    VeRL's own export beside the sharded checkpoint; weights are read from it only where "model" is not
                loaded, for it is rounded to 16 bits

A checkpoint of the optimizer alone, or of random-number states alone, is an ordinary one without the other keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.integrations.bridge.choice import tokens_of
from mbridge_fsdp_ckpt.integrations.common.root import same_on_all_ranks
from mbridge_fsdp_ckpt.integrations.verl.asynchronous import Following, remember
from mbridge_fsdp_ckpt.integrations.verl.restoration import CONTENTS, Parts, restoration
from mbridge_fsdp_ckpt.live.local_shards import optimizer_parts
from mbridge_fsdp_ckpt.live.optimizer.adapters import grouped
from mbridge_fsdp_ckpt.live.planned import plan_with_parts
from mbridge_fsdp_ckpt.live.readers.choice import reader_for
from mbridge_fsdp_ckpt.remedies import Frontend, entry_point
from mbridge_fsdp_ckpt.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Export:
    """VeRL's Hugging Face export of a step.

    Args:
        directory: The directory of the Hugging Face model, if there is one.
        load: Reads weights from it; VeRL's own method.
    """

    directory: str
    load: Callable[[str], None]


@entry_point(Frontend.VERL)
def save(manager: Any, directory: str, settings: Settings) -> None:
    """Save what `save_contents` asks for, apart from the export.

    Args:
        manager: VeRL's `MegatronCheckpointManager`.
        directory: `.../model/dist_ckpt`.  A checkpoint that is there is replaced; see `checkpoint.save`.
        settings: Time limits, checks and choices.

    Raises:
        CheckpointError: The same on every rank.  Nothing was committed, an older checkpoint stands.  Of an
            asynchronous save it is raised by the engine's next one, once that has ended.
    """
    if not (manager.should_save_model or manager.should_save_optimizer or manager.should_save_extra):
        _say("save_contents=%s asks for no sharded checkpoint", list(manager.checkpoint_save_contents))
        return
    beside, following = manager.checkpoint_config.async_save, Following(settings.storage_limit)
    saving = (checkpoint.async_save if beside else checkpoint.save)(
        directory,
        model=manager.model[0],
        optimizer=manager.optimizer if manager.should_save_optimizer else None,
        values=_values(manager),
        rank_values={"rng_state": manager.get_rng_state()} if manager.should_save_extra else {},
        include=None if manager.should_save_model else _no_weights,
        after_commit=following.after_commit if beside else None,
        settings=settings.for_vocabulary(tokens_of(manager.provider)),
    )
    if isinstance(saving, checkpoint.SaveHandle):
        remember(manager, following, saving)
    else:
        _say("saved an fsdp_dtensor_safe checkpoint to %s", directory)


def _values(manager: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        CONTENTS: [str(name) for name in manager.checkpoint_save_contents],
        "iteration": manager.previous_global_step,
    }
    if manager.should_save_optimizer and manager.lr_scheduler is not None:
        values["lr_scheduler"] = manager.lr_scheduler.state_dict()
    return values


@entry_point(Frontend.VERL)
def load(manager: Any, directory: str, export: Export, settings: Settings) -> None:
    """Load what `load_contents` asks for.  Reads checkpoints of stock VeRL, too.

    All of the sharded checkpoint that is asked for is checked before anything changes.

    Args:
        manager: VeRL's `MegatronCheckpointManager`.
        directory: `.../model/dist_ckpt`.
        export: The step's Hugging Face export.
        settings: Time limits, checks and choices.

    Raises:
        CheckpointError: The same on every rank; nothing was changed unless it is a `LoadInterruptedError`.
    """
    model = manager.should_load_model
    from_export = manager.should_load_hf_model and not model
    if from_export:
        same_on_all_ranks(lambda: _check_export(export), lambda _: export.directory, settings)
    wanted = Parts(optimizer=manager.should_load_optimizer, random=manager.should_load_extra)
    if model or wanted.optimizer or wanted.random:
        read: Callable[..., checkpoint.LoadResult] = checkpoint.load_weights
        if wanted.optimizer:
            read = checkpoint.load if model else checkpoint.load_optimizer
        read(
            directory,
            model=manager.model[0],
            optimizer=manager.optimizer,
            include=None if model or wanted.optimizer else _no_weights,
            accept=lambda found: restoration(manager, found, wanted),
            settings=settings.for_vocabulary(tokens_of(manager.provider)),
        )
        _say("loaded %s from %s", list(manager.checkpoint_load_contents), directory)
    if from_export:
        export.load(export.directory)
        _adopt_weights(manager.model[0], manager.optimizer)
        _say("loaded weights from %s", export.directory)


def _no_weights(key: str) -> bool:
    return False


def _all_of_it(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


def _check_export(export: Export) -> None:
    if not any(Path(export.directory).glob("*.safetensors")):
        raise NotACheckpointError(
            expected="a Hugging Face export with weights, which load_contents=['hf_model'] reads",
            found="no *.safetensors",
            remedy="Save with 'hf_model' in save_contents, or load 'model'.",
            key=export.directory,
        )


def _adopt_weights(model: Any, optimizer: Any) -> None:
    """Weights were written past the optimizer: refresh its copies, and what the forward pass reads."""
    reader = reader_for(model)
    with torch.no_grad():
        for part in optimizer_parts(grouped(optimizer), plan_with_parts(reader)[0].each()):
            for parameter, _ in part.parameters():
                part.adapter.refresh(parameter, _all_of_it)
            part.adapter.finish(None)
    reader.refresh()


def _say(text: str, *args: Any) -> None:
    if dist.get_rank() == 0:
        _log.info(text, *args)

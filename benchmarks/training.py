# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What every rank runs: Bridge's `pretrain`, with its saves and loads measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from benchmarks.costs import Call, Cost, Kind, Part
from mbridge_fsdp_ckpt.integrations.common import pending
from mbridge_fsdp_ckpt.patching import Patches
from testing import bridge
from testing.collectives import CollectiveCounts, count_collectives
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe
from testing.ranks import no_process_group

STOCK, SAFE, DIST = "fsdp_dtensor", mbridge_fsdp_ckpt.FORMAT_NAME, "torch_dist"


@dataclass(frozen=True, slots=True)
class Training:
    """One call of `pretrain`.

    Args:
        size: The model's.
        format: STOCK, SAFE or DIST.
        steps: The last step's number.
        saves: How many steps are followed by a save, the first ones that this call makes.
        save: Where to.
        load: Where to resume from; None starts anew.
        beside: Whether saves go on asynchronously; each has ended before the next one begins.
    """

    size: Recipe
    format: str
    steps: int
    saves: int
    save: str
    load: str | None = None
    beside: bool = False


@dataclass(slots=True)
class RankReport:
    """What one rank saw: its saves and loads in order, and the loss of each step by the step's number."""

    calls: list[Call] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)

    def saves(self) -> int:
        """How many saves were measured."""
        return sum(call.kind == "save" for call in self.calls)


@no_process_group
def train(training: Training) -> RankReport:
    """The case that a rank pool runs.

    Raises:
        RuntimeError: The format that ran is not the one that was asked for.
    """
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    replace_cuda_only_kernels()
    report, callbacks = RankReport(), CallbackManager()
    callbacks.register("on_train_step_end", functools.partial(_after_step, training, report))
    with (
        _only(training.format),
        count_collectives() as counts,
        _measured(training.format, Meter(counts), report),
        _beside(training, report),
    ):
        pretrain(_configuration(training), forward_step, callbacks=callbacks)
    return report


def _configuration(training: Training) -> Any:
    """A save after every step; all sharded, for `torch_dist` by Megatron's distributed optimizer: it knows no other."""
    from megatron.bridge.training.config import CheckpointConfig

    checkpoint = CheckpointConfig(
        save=training.save,
        load=training.load,
        save_interval=1,
        ckpt_format=training.format,
        async_save=training.beside,
    )
    config = bridge.configuration(training.size, training.steps, checkpoint)
    if training.format == DIST:
        config.ddp.use_megatron_fsdp = False
        config.ddp.data_parallel_sharding_strategy = "no_shard"
        config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
        config.checkpoint.fully_parallel_save = True
    return config


def _after_step(training: Training, report: RankReport, context: Any) -> None:
    """Note the loss; steps that come after the last measured save are not saved."""
    state = context.state
    pending.settle()
    if training.beside and training.format != SAFE:
        state.async_calls_queue.maybe_finalize_async_calls(blocking=True)
    report.losses[state.train_state.step + 1] = float(context.loss_dict["lm loss"])
    if report.saves() == training.saves:
        state.cfg.checkpoint.save = None


def _beside(training: Training, report: RankReport) -> AbstractContextManager[None]:
    """What asynchronous saves need, to be measured or to run."""
    if not training.beside:
        return nullcontext()
    return _kept(report) if training.format == SAFE else _without_device()


@contextmanager
def _without_device() -> Iterator[None]:
    """While the block runs, Bridge's own writers look for no GPU, as they do before they know what is to be written."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import PersistentAsyncCaller

    start = PersistentAsyncCaller._start_worker

    def start_without(caller: Any, rank: int) -> None:
        caller.cpu_shm_mode = True
        start(caller, rank)

    with patch.object(PersistentAsyncCaller, "_start_worker", start_without):
        yield


@contextmanager
def _kept(report: RankReport) -> Iterator[None]:
    """While the block runs, keep what asynchronous saves tell; then add what training waited after their calls.

    Raises:
        RuntimeError: A save was not beside it.
    """
    from mbridge_fsdp_ckpt import checkpoint

    save, kept = checkpoint.async_save, []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        saving = save(*args, **kwargs)
        kept.append((saving, saving.stalled))
        return saving

    with patch.object(checkpoint, "async_save", keeping):
        yield
    if len(kept) != len(report.calls):
        raise RuntimeError(f"{len(report.calls)} saves were measured, {len(kept)} went on asynchronously")
    report.calls = [
        replace(call, whole=call.whole + Cost(saving.stalled - own))
        for call, (saving, own) in zip(report.calls, kept, strict=True)
    ]


@contextmanager
def _only(format_name: str) -> Iterator[None]:
    """Bridge as it was installed for its own formats, with this package registered for ours."""
    if format_name == SAFE:
        mbridge_fsdp_ckpt.register()
    else:
        mbridge_fsdp_ckpt.unregister()
        _check_untouched()
    try:
        yield
    finally:
        mbridge_fsdp_ckpt.unregister()


def _check_untouched() -> None:
    from megatron.bridge.training import checkpointing, optim
    from megatron.bridge.training.config import ConfigContainer

    functions = (
        checkpointing.save_checkpoint,
        checkpointing._load_checkpoint_from_path,
        optim.sync_hybrid_device_optimizer_fp32_master_copies,
        ConfigContainer.validate,
    )
    package = str(Path(mbridge_fsdp_ckpt.__path__[0]))
    for function in functions:
        if function.__code__.co_filename.startswith(package):
            raise RuntimeError(f"{function.__qualname__} is replaced: this would not measure the stock format")


class Meter:
    """Measures calls, and parts of them."""

    def __init__(self, counts: CollectiveCounts) -> None:
        self._counts = counts
        self._meetings = 0
        self._parts: dict[Part, Cost] = {}

    def whole(self, kind: Kind, function: Callable[..., Any], report: RankReport) -> Callable[..., Any]:
        """`function`, appending to the report; a barrier that is not counted lets all ranks begin together."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            names = self._counts.collectives.copy()
            self._parts = {"preparation": Cost(), "gather": Cost()}
            before = self._read()
            result = function(*args, **kwargs)
            cost = self._since(before)
            counted = dict(self._counts.collectives - names)
            report.calls.append(Call(kind, cost, names=counted, **self._parts))
            return result

        return measured

    def part(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, adding to a part of the call that it is in; outside of calls nothing is kept."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            before = self._read()
            result = function(*args, **kwargs)
            self._parts[part] = self._parts.get(part, Cost()) + self._since(before)
            return result

        return measured

    def meeting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted as a meeting."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._meetings += 1
            return function(*args, **kwargs)

        return counted

    def _read(self) -> Cost:
        return Cost(time.perf_counter(), self._counts.total, self._meetings)

    def _since(self, before: Cost) -> Cost:
        now = self._read()
        return Cost(now.seconds - before.seconds, now.collectives - before.collectives, now.meetings - before.meetings)


@contextmanager
def _measured(format_name: str, meter: Meter, report: RankReport) -> Iterator[None]:
    """Wrap what is measured, for as long as the block runs."""
    from megatron.bridge.training import checkpointing, setup

    from mbridge_fsdp_ckpt.coordination.coordination import Coordination
    from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import MegatronFsdpReader
    from mbridge_fsdp_ckpt.saving import snapshot
    from mbridge_fsdp_ckpt.saving.write_plan import PlanComparison

    create = setup.create_checkpoint_manager

    def create_measured(checkpoint_config: Any) -> Any:
        manager = create(checkpoint_config)
        _check_manager(manager, format_name)
        manager.save = meter.whole("save", manager.save, report)
        manager.load = meter.whole("load", manager.load, report)
        return manager

    patches = Patches()
    patches.set(setup, "create_checkpoint_manager", create_measured)
    patches.set(Coordination, "meet", meter.meeting(Coordination.meet))
    parts: list[tuple[Part, Any, Callable[..., Any]]] = [  # a name that is gone is an error of types
        ("preparation", checkpointing, checkpointing.preprocess_fsdp_dtensor_state_dict),
        ("preparation", snapshot, snapshot.observe),
        ("preparation", snapshot, snapshot.plan_save),
        ("preparation", PlanComparison, PlanComparison.message),
        ("gather", MegatronFsdpReader, MegatronFsdpReader.refresh),
    ]
    for part, owner, function in parts:
        patches.set(owner, function.__name__, meter.part(part, function))
    try:
        yield
    finally:
        patches.undo()


def _check_manager(manager: Any, format_name: str) -> None:
    expected = "SafeCheckpointManager" if format_name == SAFE else "DefaultCheckpointManager"
    if type(manager).__name__ != expected:
        raise RuntimeError(f"{format_name} is to be saved by {expected}, not by {type(manager).__name__}")

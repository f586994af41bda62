# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What is run, and that what was timed was right."""

from __future__ import annotations

import functools
import math
import operator
import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint import FileSystemReader

from benchmarks.costs import Call, Cost, slowest
from benchmarks.harness import Say, ranks_of
from benchmarks.large import MODELS
from benchmarks.memory import drop_from_cache
from benchmarks.training import DIST, SAFE, STOCK, RankReport, Training, train
from benchmarks.usage import descendants
from mbridge_fsdp_ckpt.opening import open_checkpoint
from testing.models import Recipe
from testing.ranks import RankPool, no_process_group

PRELOAD = (
    "transformer_engine.pytorch",
    "megatron.bridge.training.pretrain",
    "mbridge_fsdp_ckpt.integrations.bridge.manager",
)
"""What the ranks import before CUDA is replaced, Transformer Engine first."""

VOCABULARY = 128

Order = Literal["first", "later"]


def many(experts: int, layers: int) -> Recipe:
    """A model of many tiny tensors: what a format spends on it is the cost of a tensor, not of its bytes."""
    return Recipe(layers=layers, hidden=64, ffn=64, experts=experts, vocabulary=VOCABULARY)


LARGE = {name: MODELS[name].recipe.on(vocabulary=VOCABULARY) for name in ("0.43 GB", "1.7 GB", "4 GB")}
"""Of few large tensors, by gigabytes of weights and moments in fp32."""


@dataclass(frozen=True, slots=True)
class Case:
    """Train and save `saves` times; then resume from the last save `resumes` times, each a load and one save."""

    format: str
    size: Recipe
    ranks: int
    saves: int
    resumes: int = 0
    beside: bool = False

    def __str__(self) -> str:
        return f"{self.format}{', asynchronously' if self.beside else ''}: {self.model} on {self.ranks} ranks"

    @property
    def model(self) -> str:
        """The model in words."""
        if self.size.experts:
            return f"MoE of {self.size.experts} experts x {self.size.layers} layers"
        return f"{self.size.layers} dense layers, {self.size.hidden:,} wide"


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's reports, by rank.

    Args:
        case: What was run.
        trained: The runs from scratch.
        resumed: The runs that loaded.
        keys: Tensors in its checkpoint.
        size: Bytes of its files.
    """

    case: Case
    trained: list[list[RankReport]]
    resumed: list[list[RankReport]]
    keys: int
    size: int

    def saves(self, order: Order) -> list[list[Call]]:
        """The first save of every run, or all others; each by rank."""
        runs = [*self.trained, *self.resumed]
        by_run = [[call for call in _by_rank(run) if call[0].kind == "save"] for run in runs]
        return [call for calls in by_run for call in (calls[:1] if order == "first" else calls[1:])]

    def __add__(self, other: Measured) -> Measured:
        """The runs of both."""
        return replace(self, trained=self.trained + other.trained, resumed=self.resumed + other.resumed)

    def loads(self) -> list[list[Call]]:
        """Every load, by rank."""
        return [call for run in self.resumed for call in _by_rank(run) if call[0].kind == "load"]


def _by_rank(run: list[RankReport]) -> list[list[Call]]:
    return [list(call) for call in zip(*(report.calls for report in run), strict=True)]


def whole(calls: list[list[Call]]) -> list[Cost]:
    """Each call as the slowest rank saw it."""
    return [slowest(call.whole for call in ranks) for ranks in calls]


def but_for_gather(calls: list[list[Call]]) -> list[Cost]:
    """Each load without Megatron-FSDP's gather, as the slowest rank saw it."""
    return [
        slowest(replace(call.whole, seconds=call.whole.seconds - call.gather.seconds) for call in ranks)
        for ranks in calls
    ]


def preparation(calls: list[list[Call]]) -> list[Cost]:
    """The preparation of each call, as the slowest rank saw it."""
    return [slowest(call.preparation for call in ranks) for ranks in calls]


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark.

    Args:
        sides: Stock, ours, and ours asynchronously.
        others: Bridge's other ways to save: stock asynchronously, and `torch_dist` in both ways.
        small: Smaller ones, which show what collectives depend on.
        rounds: How many times all sides and others are run, one after the other.
    """

    sides: tuple[Case, Case, Case]
    others: tuple[Case, ...]
    small: tuple[Case, ...]
    rounds: int

    @classmethod
    def of(cls, rounds: int, *, quick: bool, size: Recipe | None = None) -> Suite:
        """The whole benchmark, or a quick look at it; of the sides' own size, or another."""
        few, most = (many(2, 2), many(8, 2)) if quick else (many(8, 4), many(64, 4))
        most, saves = size or most, 2 if quick else 4  # one of them is the first
        stock, safe, dist = (Case(name, most, 4, saves, resumes=1) for name in (STOCK, SAFE, DIST))
        stock_beside, safe_beside, dist_beside = (replace(case, resumes=0, beside=True) for case in (stock, safe, dist))
        small = [Case(name, few, ranks, 2) for ranks in (2, 4) for name in (STOCK, SAFE)]
        small.append(Case(SAFE, most, 2, 2))
        return cls((stock, safe, safe_beside), (stock_beside, dist, dist_beside), tuple(small), rounds)


def run_suite(suite: Suite, scratch: Path, say: Say) -> list[Measured]:
    """Run everything: what was measured of all sides, of all others, and of all small cases, in this order."""
    ways = (*suite.sides, *suite.others)
    with ranks_of(4, scratch, PRELOAD) as (pool, _):
        say("starting the ranks")
        pool.start()
        small = [run_case(pool, case, scratch, say) for case in suite.small]
        rounds = [[run_case(pool, case, scratch, say) for case in ways] for _ in range(suite.rounds)]
    return [*(functools.reduce(operator.add, runs) for runs in zip(*rounds, strict=True)), *small]


def run_case(pool: RankPool, case: Case, scratch: Path, say: Say) -> Measured:
    """Run one case in a directory of its own.

    Raises:
        RuntimeError: A checkpoint is incomplete, or training did not go on as if it had never stopped.
    """
    say(f"{case}, saves: {case.saves}" + (f", loads: {case.resumes}" if case.resumes else ""))
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=scratch) as directory:
        root, steps = f"{directory}/trained", case.saves + 1
        trained = _run(pool, case, Training(case.size, case.format, steps, case.saves, root, beside=case.beside))
        keys = _check_checkpoint(case.format, Path(root), case.saves)
        resumed = []
        for number in range(case.resumes):
            target = f"{directory}/resumed{number}"
            os.sync()
            drop_from_cache(Path(root))
            resume = Training(case.size, case.format, steps, 1, target, load=root)
            resumed.append(_run(pool, case, resume))
            _check_checkpoint(case.format, Path(target), steps)
        iteration = Path(root) / f"iter_{case.saves:07d}"
        size = sum(path.stat().st_size for path in iteration.rglob("*") if path.is_file())
    measured = Measured(case, [trained], resumed, keys, size)
    _check_losses(measured, steps)
    return measured


def _run(pool: RankPool, case: Case, training: Training) -> list[RankReport]:
    """Run it, and end its processes: what Megatron leaves in them (gloo's threads above all) would slow the next."""
    reports: list[RankReport] = pool.run(train, training, ranks=case.ranks)
    pool.run(leave, ranks=case.ranks, may_die=range(case.ranks))
    return reports


@no_process_group
def leave() -> None:
    """End this rank's process; the pool forks another one when it needs it.

    So do the writers that Bridge has begun: nothing else ends them, and each takes hundreds of megabytes.
    """
    for process in descendants():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(0)


def _check_checkpoint(format_name: str, root: Path, step: int) -> int:
    """Read all of it, where this package can: the resumed run does with `torch_dist`.  The number of its keys."""
    directory = root / f"iter_{step:07d}"
    if format_name == DIST:
        return len(FileSystemReader(directory).read_metadata().state_dict_metadata)
    source = open_checkpoint(directory)
    for key, chunks in source.chunks(source.metadata.keys).items():
        stored = sum(source.read(chunk).numel() for chunk in chunks)
        expected = math.prod(source.metadata.keys[key].shape)
        if stored != expected:
            raise RuntimeError(f"{root} holds {stored} of {expected} elements of {key}")
    return len(source.metadata.keys)


def _check_losses(measured: Measured, step: int) -> None:
    """All ranks agree, and every resumed run's step gave, to the last bit, the loss of the run that never stopped."""
    uninterrupted = measured.trained[0][0].losses[step]
    if not math.isfinite(uninterrupted):
        raise RuntimeError(f"{measured.case}: the loss of step {step} is {uninterrupted}")
    for run in [*measured.trained, *measured.resumed]:
        for report in run:
            if report.losses[step] != uninterrupted:
                raise RuntimeError(
                    f"{measured.case}: step {step} gave the loss {report.losses[step]!r}, not {uninterrupted!r}"
                )

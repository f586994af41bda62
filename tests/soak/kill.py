# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the kill matrix: a save during which one of them is killed, and the resume after it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.commit import removal, rename
from mbridge_fsdp_ckpt.commit.lease import STALE_S
from mbridge_fsdp_ckpt.commit.retention import prune_later
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.names import TRACKER
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.files import replace_file
from testing.models import Recipe, Trainable
from tests.core import cases, oracle
from tests.patched import patched

RECIPE = Recipe(layers=1)
OLD, NEW, NEXT = 1, 2, 3
"""Training steps of the two states, the older of which stands when the killed save begins; then a later iteration."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a save or its commit, at which a rank can be killed.

    Args:
        name: Module and function.
        ranks: Who takes it.
        times: How often it is taken, at least.
        fresh: Whether a save into a fresh directory takes it.
        exchanges: Whether it belongs to file systems that exchange directories; the others rename twice.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    times: int = 1
    fresh: bool = True
    exchanges: bool = True


EVERYBODY = (0, 1)
STEPS = (
    Step("saving.snapshot:plan_save", EVERYBODY),
    Step("coordination.coordination:Coordination.meet", EVERYBODY, times=2),
    Step("saving.write_plan:PlanComparison.decide"),
    Step("commit.methods:condemn_leftovers"),
    Step("commit.methods:begin"),
    Step("saving.writer:write", EVERYBODY),
    Step("format.payload:PayloadWriter.add_pieces", EVERYBODY, times=3),
    Step("format.payload:PayloadWriter.close", EVERYBODY),
    Step("format.write_results:write_file", EVERYBODY),
    Step("format.write_results:write_file", times=2),
    Step("io.direct_writer:os.fsync", EVERYBODY, times=2),
    Step("saving.writer:CommitRound.decide"),
    Step("dcp.writer:write_dcp_view"),
    Step("commit.rename:write_file"),
    Step("coordination.coordination:Coordination.fence"),
    Step("commit.rename:put_in_place"),
    Step("commit.rename:sync_directory", times=2),
    Step("commit.rename:_exchange", fresh=False),
    Step("pathlib:Path.rename"),
    Step("commit.removal:shutil.rmtree", fresh=False),
    Step("pathlib:Path.rename", times=3, fresh=False, exchanges=False),
    Step("commit.rename:sync_directory", times=2, fresh=False, exchanges=False),
    Step("commit.removal:shutil.rmtree", fresh=False, exchanges=False),
    Step("coordination.coordination:Coordination.end", EVERYBODY),
    Step("saving.commit:Job.clean_up", EVERYBODY),
    Step("pathlib:Path.replace", times=2),  # .metadata, then the tracker
)


def call_of(step: str) -> str:
    """The call that a step's name stands for, as `patched` takes it."""
    return step if step.startswith("pathlib:") else f"mbridge_fsdp_ckpt.{step}"


@dataclass(frozen=True, slots=True)
class Death:
    """Where a rank dies by its own hand.

    Args:
        step: Module and function.
        time: At which of its calls, from 1.
        after: After the call rather than before it.
        rank: Which rank.
    """

    step: str
    time: int
    after: bool
    rank: int


def iteration(root: str | Path, number: int) -> Path:
    """The directory of an iteration."""
    return Path(root) / f"iter_{number:07d}"


def save(
    root: str | Path, number: int, trainable: Trainable, settings: Settings | None = None, *, background: bool = False
) -> None:
    """Save as a training loop does: with the commit the tracker."""
    tracker = Path(root) / TRACKER
    (mbridge_fsdp_ckpt.async_save if background else mbridge_fsdp_ckpt.save)(
        iteration(root, number),
        model=trainable.model,
        optimizer=trainable.optimizer,
        values={"iteration": number},
        after_commit=lambda: replace_file(tracker, str(number).encode()),
        settings=settings,
    )


def save_and_publish(root: str | Path, number: int, trainable: Trainable, settings: Settings | None = None) -> None:
    """The same, and then the old checkpoints."""
    save(root, number, trainable, settings)
    if dist.get_rank() == 0:
        prune_later(Path(root), keep=2)


def save_state(root: str, number: int, steps: int) -> Any:
    """Train, save, publish; what was live."""
    trainable = cases.prepared(RECIPE, steps=steps)
    save_and_publish(root, number, trainable)
    return oracle.live(trainable)


def save_and_die(root: str, number: int, heartbeats: str, death: Death | None, exchanges: bool) -> str:
    """Save the newer state as iteration `number`; somebody is killed meanwhile.  What a survivor saw."""
    trainable = cases.prepared(RECIPE, steps=NEW)
    settings = mbridge_fsdp_ckpt.Settings(time_limit=5.0)
    dist.barrier()
    with signed(Path(heartbeats)), _mortal(death), _without_exchange(exchanges):
        try:
            save_and_publish(root, number, trainable, settings)
        except CheckpointError as error:
            return type(error).__name__
        assert removal.wait(60.0)
    return "saved"


@contextmanager
def signed(heartbeats: Path) -> Iterator[None]:
    """Tell the process that kills when this rank begins and when it is through."""
    (heartbeats / f"began-{dist.get_rank()}").touch()
    yield
    (heartbeats / f"ended-{dist.get_rank()}").touch()


def resume(root: str, number: int) -> dict[str, Any]:
    """What the tracker names, loaded into a model initialised otherwise; then the saves with which the run goes on.

    The first is the one that died, once more: what is left of it goes at once.  The next one takes away what nobody
    has touched for an hour: a tracker file that was about to be replaced.
    """
    trainable = cases.prepared(RECIPE, seed=999)
    directory = find_checkpoint(Path(root))
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    found, left = oracle.live(trainable), []
    for target in (iteration(root, number), iteration(root, NEXT)):
        mbridge_fsdp_ckpt.save(target, model=trainable.model, optimizer=trainable.optimizer)
        assert removal.wait(60.0)
        dist.barrier()
        left.append(sorted(path.name for path in Path(root).glob(".*")))
        dist.barrier()
        for path in Path(root).glob(".*"):
            os.utime(path, (time.time() - 2 * STALE_S,) * 2)
        dist.barrier()
    return {"from": directory.name, "live": found, "left": left}


@contextmanager
def _mortal(death: Death | None) -> Iterator[None]:
    """Kill this process at the step, if it is the one to die."""
    if death is None or death.rank != dist.get_rank():
        yield
        return
    with patched(call_of(death.step), lambda function: _killing(function, death)):
        yield


def _killing(function: Callable[..., Any], death: Death) -> Callable[..., Any]:
    calls = itertools.count(1)

    def killing(*args: Any, **kwargs: Any) -> Any:
        fatal = next(calls) == death.time
        if fatal and not death.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return killing


@contextmanager
def _without_exchange(exchanges: bool) -> Iterator[None]:
    """As on a file system that cannot exchange two directories."""
    if exchanges:
        yield
    else:
        with patch.object(rename, "_exchange", lambda one, other: False):
            yield

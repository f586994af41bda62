# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the slow matrix: saves and loads during which one call of one rank's storage takes long.

Of an asynchronous save it is a writer's storage, or its trainer's copying.  A writer is told where it finds which
call of its next save is slow, and leaves there what it counted.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.commit import removal, rename
from mbridge_fsdp_ckpt.coordination import meeting
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.settings import DEFAULT_TIME_LIMIT
from testing.models import Recipe
from tests.core import cases, oracle
from tests.patched import patched
from tests.soak import in_writer

RECIPE = Recipe(layers=1)
LIMIT_S, GRACE_S = 1.6, 0.8
SLOW_S = 2.5 * LIMIT_S

SAVES = ("fresh save", "overwriting save", "overwriting save without exchange", "overwriting save by marker")
SHARED = "load on one host"
"""The rank that comes first reads for both; in the other load each rank is as alone on a host, and reads for itself."""
SCENARIOS = (*SAVES, "load", SHARED)
BESIDE = ("fresh save beside", "overwriting save beside")
COPY = "copy"
"""Of a trainer: a block into staging memory."""

LIMIT_BESIDE_S = 3.0
SLOW_BESIDE_S = 2.5 * LIMIT_BESIDE_S

CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "fsync": ((os, "fsync"), (os, "fdatasync")),
    "rename": ((os, "rename"), (os, "replace"), (rename, "_exchange")),
    "rmtree": ((shutil, "rmtree"),),
    "open": ((os, "open"), (io, "open")),
    "read": ((os, "preadv"),),  # and what is opened
    "write": ((os, "pwrite"),),  # and what is opened
    "unlink": ((os, "unlink"), (os, "remove")),
    "stat": ((os, "stat"), (os, "lstat")),
}
METHODS = {"read": ("read", "readline", "readinto"), "write": ("write",)}
"""Of files that are open."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A call that takes long.

    Args:
        scenario: During what.
        call: Of which kind.
        rank: On which rank.
        number: Which of the rank's calls of the kind, counted from 1; with 0 they are only counted.
    """

    scenario: str
    call: str
    rank: int
    number: int


def run(root: str, trials: list[Trial]) -> list[dict[str, Any]]:
    """Each trial in turn: the calls that were made, the error if there was one, and whether all is right after it."""
    trainable = cases.prepared(RECIPE, steps=1)
    found = []
    for number, trial in enumerate(trials):
        place = Path(root) / str(number)
        found.append(_load(place, trainable, trial) if "load" in trial.scenario else _save(place, trainable, trial))
    return found


def _save(place: Path, trainable: Any, trial: Trial) -> dict[str, Any]:
    """What is on disk, as torch reads it, is what was live."""
    commit: Literal["marker", "rename"] = "marker" if "marker" in trial.scenario else "rename"

    def save(limit: float = DEFAULT_TIME_LIMIT) -> None:
        settings = mbridge_fsdp_ckpt.Settings(commit=commit, time_limit=limit)
        mbridge_fsdp_ckpt.save(target, model=trainable.model, optimizer=trainable.optimizer, settings=settings)

    target = place / "iter_0000001"
    if "overwriting" in trial.scenario:
        save()
    trainable.step(1)
    live = oracle.live(trainable)
    exchange = rename._exchange if "without" not in trial.scenario else lambda one, other: False
    with patch.object(rename, "_exchange", exchange):
        seen = _seen(place, trial, lambda: save(LIMIT_S))
    on_disk = {key: found for key, found in oracle.on_disk(target).items() if found[1]}  # without step, a scalar
    return {**seen, "right": on_disk == live == oracle.live(trainable), "left": cases.names_in(place)}


def run_beside(root: str, trials: list[Trial]) -> list[dict[str, Any]]:
    """Each trial in turn, beside one step of training, by one writer."""
    trainable = cases.prepared(RECIPE, steps=1)
    told = Path(root) / f"told-{dist.get_rank()}.json"
    told.parent.mkdir(parents=True, exist_ok=True)
    async_saves().stop()
    with in_writer.told(make_slow, str(told), dist.get_rank()):
        found = [_save_beside(Path(root) / str(number), trainable, trial, told) for number, trial in enumerate(trials)]
    async_saves().stop()
    return found


def _save_beside(place: Path, trainable: Any, trial: Trial, told: Path) -> dict[str, Any]:
    """What is on disk, as torch reads it, is what was live when the save began; a step of training has changed that."""
    whole = {"model": trainable.model, "optimizer": trainable.optimizer}
    settings = mbridge_fsdp_ckpt.Settings(time_limit=LIMIT_BESIDE_S)
    target, error = place / "iter_0000001", None
    if "overwriting" in trial.scenario:
        mbridge_fsdp_ckpt.save(target, **whole)
    trainable.step(1)
    live, copies = oracle.live(trainable), Slowness(place, trial, dist.get_rank(), SLOW_BESIDE_S)
    told.write_text(json.dumps([str(place), *astuple(trial)]))
    dist.barrier()
    with patch.object(meeting, "GRACE", GRACE_S), patched(COPYING, copies.counted(COPY)):
        try:
            mbridge_fsdp_ckpt.async_save(target, **whole, settings=settings)
            trainable.step(2)
            mbridge_fsdp_ckpt.finish_saves()
        except CheckpointError as caught:
            error = f"{type(caught).__name__}: {caught}"
    dist.barrier()
    calls, was_slow = json.loads(_seen_at(told).read_text())
    on_disk = {key: found for key, found in oracle.on_disk(target).items() if found[1]}  # without step, a scalar
    return {
        "error": error,
        "calls": {**calls, **copies.calls},
        "was_slow": was_slow or copies.was_slow,
        "right": on_disk == live != oracle.live(trainable),
        "left": cases.names_in(place),
    }


COPYING = "mbridge_fsdp_ckpt.saving.background.filling:Filling.add"
"""What is slow in a trainer, of each chunk."""

SAVING = "mbridge_fsdp_ckpt.saving.background.checkpoint_main:Writer._save"
"""Within which a writer's storage is slow."""


def _seen_at(told: Path) -> Path:
    return told.with_suffix(".seen")


def make_slow(told: str, rank: int) -> None:
    """In a writer, before it does anything: in each save one call of its storage takes long, if the trial says so."""
    meeting.GRACE = GRACE_S

    def slow(save: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            place, *trial = json.loads(Path(told).read_text())
            slowness = Slowness(Path(place), Trial(*trial), rank, SLOW_BESIDE_S)
            with slowness.holding():
                try:
                    return save(*args)
                finally:
                    assert removal.wait(60.0)
                    _seen_at(Path(told)).write_text(json.dumps([slowness.calls, slowness.was_slow]))

        return call

    patched(SAVING, slow).start()


def _load(place: Path, trainable: Any, trial: Trial) -> dict[str, Any]:
    """What is live is what was saved."""
    target, settings = place / "iter_0000001", mbridge_fsdp_ckpt.Settings(time_limit=LIMIT_S)
    whole = {"model": trainable.model, "optimizer": trainable.optimizer}
    mbridge_fsdp_ckpt.save(target, **whole)
    saved = oracle.live(trainable)
    trainable.step(1)
    assert oracle.live(trainable) != saved
    hosts = {} if trial.scenario == SHARED else {"LOCAL_WORLD_SIZE": "1"}
    with patch.dict(os.environ, hosts):
        seen = _seen(place, trial, lambda: mbridge_fsdp_ckpt.load(target, **whole, settings=settings))
    return {**seen, "right": oracle.live(trainable) == saved, "left": cases.names_in(place)}


def _seen(place: Path, trial: Trial, action: Callable[[], Any]) -> dict[str, Any]:
    error = None
    slowness = Slowness(place, trial, dist.get_rank(), SLOW_S)
    dist.barrier()
    with patch.object(meeting, "GRACE", GRACE_S), slowness.holding():
        try:
            action()
        except CheckpointError as caught:
            error = f"{type(caught).__name__}: {caught}"
        assert removal.wait(60.0)
    dist.barrier()
    return {"error": error, "calls": dict(slowness.calls), "was_slow": slowness.was_slow}


class Slowness:
    """Counts a rank's storage calls below a directory, and lets one of them take long.

    Args:
        place: The directory.
        trial: Which.
        rank: This one.
        seconds: How long it takes.
    """

    def __init__(self, place: Path, trial: Trial, rank: int, seconds: float) -> None:
        self.calls: Counter[str] = Counter()
        self.was_slow = False
        self._place, self._trial, self._seconds = str(place), trial, seconds
        self._here = rank == trial.rank
        self._lock, self._inside = threading.Lock(), threading.local()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While the block runs."""
        with ExitStack() as stack:
            for kind, functions in CALLS.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self._wrapped(kind, getattr(owner, name))))
            stack.enter_context(patch.object(io, "open", self._opening(io.open)))
            yield

    def counted(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes of a function, wherever it works, one whose calls are of a kind."""
        return lambda function: self._method(kind, function)

    def _wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_ours(args[0], kwargs):
                self._take(kind)
            return function(*args, **kwargs)

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Files below the directory, whose reading and writing count, too."""

        def call(place: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self._is_ours(place, kwargs)
            file = function(place, *args, **kwargs)
            for kind, names in METHODS.items() if ours else ():
                for name in names:
                    if hasattr(file, name):
                        setattr(file, name, self._method(kind, getattr(file, name)))
            return file

        return call

    def _method(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._take(kind)
            return function(*args)

        return call

    def _take(self, kind: str) -> None:
        with self._lock:
            self.calls[kind] += 1
            slow = self._here and kind == self._trial.call and self.calls[kind] == self._trial.number
        if slow:
            self.was_slow = True
            time.sleep(self._seconds)

    def _is_ours(self, place: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a path, or an open file, lies below the directory."""
        if kwargs.get("dir_fd") is not None:
            place = kwargs["dir_fd"]
        if isinstance(place, int):
            place = Path(f"/proc/self/fd/{place}").readlink()
        return os.fsdecode(place).startswith(self._place)

"""What ranks do in the slow matrix: saves and loads during which one call of one rank's storage takes long."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.agree import meeting
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.settings import DEFAULT_TIME_LIMIT
from mbridge_fsdp_ckpt.storage.commit import removal, rename
from mbridge_fsdp_ckpt.testing.models import Recipe
from tests.core import cases, oracle

RECIPE = Recipe(layers=1)
LIMIT_S, GRACE_S = 1.6, 0.8
SLOW_S = 2.5 * LIMIT_S

SAVES = ("fresh save", "overwriting save", "overwriting save without exchange", "overwriting save by marker")
SHARED = "load on one host"
"""The rank that comes first reads for both; in the other load each rank is as alone on a host, and reads for itself."""
SCENARIOS = (*SAVES, "load", SHARED)

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
    slowness = Slowness(place, trial)
    dist.barrier()
    with patch.object(meeting, "_GRACE", GRACE_S), slowness.holding():
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
    """

    def __init__(self, place: Path, trial: Trial) -> None:
        self.calls: Counter[str] = Counter()
        self.was_slow = False
        self._place, self._trial = str(place), trial
        self._here = dist.get_rank() == trial.rank
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
            time.sleep(SLOW_S)

    def _is_ours(self, place: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a path, or an open file, lies below the directory."""
        if kwargs.get("dir_fd") is not None:
            place = kwargs["dir_fd"]
        if isinstance(place, int):
            place = Path(f"/proc/self/fd/{place}").readlink()
        return os.fsdecode(place).startswith(self._place)

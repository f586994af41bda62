# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of processes that are forked while a save goes on: data loaders, and others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from tests.core.beside import PATIENT, Run


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def loads(root: str) -> dict[str, Any]:
    """Data loaders with forked workers before, during and after a save that goes on for as long as they want."""
    run, found = Run(root, settings=PATIENT), dict[str, Any]()

    def loader(*, stay: bool) -> Any:
        return DataLoader(_Numbers(), num_workers=2, multiprocessing_context="fork", persistent_workers=stay)

    def read(what: str, loading: Any) -> None:
        found[what] = [int(item) for batch in loading for item in batch]

    stays = loader(stay=True)
    read("before", stays)
    run.warm()
    read("after a save", loader(stay=False))
    run.writer(signal.SIGSTOP)
    saving = run.save()
    during = loader(stay=True)
    read("while it is copied, perhaps", during)
    saving.wait_until_taken()
    for what in ("gone", "exits", "stays"):
        read(what, loader(stay=False))
    read("stays from before", stays)
    run.writer(signal.SIGCONT)
    found["error"] = run.ended()["error"]
    read("stays from the middle", during)
    run.save()
    found["next"] = run.ended()["error"]
    return found


def forks(root: str) -> dict[str, Any]:
    """Children that leave in different ways while a save goes on, and one that outlives it; what each of them found."""
    run = Run(root, settings=PATIENT)
    run.warm()
    run.writer(signal.SIGSTOP)
    saving = run.save()
    saving.wait_until_taken()
    told = Path(root)

    def asks() -> str:
        seen = []
        for ask in (saving.wait, saving.result, saving.wait_until_taken, lambda: saving.done, lambda: saving.taken):
            try:
                ask()
            except CheckpointError as error:
                seen.append(type(error).__name__)
        mbridge_fsdp_ckpt.finish_saves()  # of this process, which has begun none
        return " ".join(seen)

    def outlives() -> str:
        while not (told / "released").exists():
            time.sleep(0.05)
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return " ".join(link for link in links if "memfd:mbridge" in link) + _mapped()

    children = {
        "asks": _forked(told / "asks", asks, sys.exit),
        "leaves": _forked(told / "leaves", lambda: "left", os._exit),
        "outlives": _forked(told / "outlives", outlives, sys.exit),
    }
    codes = {what: _code(children[what]) for what in ("asks", "leaves")}
    writer = async_saves()._writer
    assert writer is not None
    same = writer.pid
    run.writer(signal.SIGCONT)
    error = run.ended()["error"]
    mbridge_fsdp_ckpt.release_staging()
    (told / "released").touch()
    codes["outlives"] = _code(children["outlives"])
    run.save()
    after = run.ended()["error"]
    return {
        "codes": codes,
        "said": {what: (told / what).read_text() for what in children},
        "errors": [error, after],
        "same": async_saves()._writer is writer and writer.pid == same,
    }


def _mapped() -> str:
    return " ".join(line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mbridge" in line)


def _forked(told: Path, action: Callable[[], str], leave: Callable[[int], Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        told.write_text(action())
    except BaseException as error:
        told.write_text(repr(error))
    try:
        leave(0)
    except SystemExit:
        import atexit

        atexit._run_exitfuncs()  # as the interpreter does for a child that is not one of a test's ranks
        os._exit(0)
    return 0


def _code(child: int, seconds: float = 30.0) -> int | None:
    """What a child ended with; None, and it is killed, if it does not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of one save's life: whatever happens to it, it ends by name, and the next one is whole."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.coordination.incarnation import base_of, default_store
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.names import STAGING
from mbridge_fsdp_ckpt.format.names import beside as hidden
from mbridge_fsdp_ckpt.saving.background.async_saves import AsyncSaves, async_saves
from mbridge_fsdp_ckpt.saving.background.channel import Channel
from mbridge_fsdp_ckpt.saving.background.filling import Filling
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle
from tests.core.beside import LIMIT_S, QUICK, Run
from tests.soak.kill import iteration

LONG_S = 2 * LIMIT_S + 1.0
"""Longer than any limit of `QUICK`."""

Ended = dict[str, Any]


def writer_pid() -> int:
    """This rank's checkpoint process."""
    writer = async_saves()._writer
    assert writer is not None
    return writer.pid


def _raises(error: BaseException) -> Callable[..., Any]:
    def fails(*_: Any) -> None:
        raise error

    return fails


# -- callbacks of the user's


def callbacks(root: str) -> dict[str, Any]:
    """Callbacks that come back late or leave the program, and a logging handler that raises."""
    run = Run(root)
    return {
        "late": _late_answer(run),
        "exits": [_exits(run, what) for what in ("add_files", "after_commit")],
        "logs": _handler_raises(run),
        "numbers": _numpy_numbers(run),
    }


def _late_answer(run: Run) -> list[Any]:
    """The first save ends while `add_files` hangs; it comes back while the next save's is at work."""
    asked, late = threading.Event(), threading.Event()

    def hangs(staging: Path) -> None:
        asked.set()
        late.wait(60.0)

    def adds(staging: Path) -> None:
        late.set()
        time.sleep(1.0)
        (staging / "extra.txt").write_text("whole")

    run.save(add_files=hangs)
    if dist.get_rank() == 0:
        assert asked.wait(60.0)
        run.writer(signal.SIGKILL)
    first = run.ended()
    run.save(add_files=adds)
    second = run.ended()
    return [first["error"], second["error"], run.number]


def _exits(run: Run, what: str) -> Ended:
    """`sys.exit()` on rank 0."""
    run.save(**{what: _raises(SystemExit(3))})
    return run.ended()


def _handler_raises(run: Run) -> Ended:
    """Rank 0's checkpoint process has something to log, and so has this process."""

    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("a disk for logs is full")

    if dist.get_rank() == 0:
        target = iteration(run.root, run.number + 1)
        (target.parent / hidden(STAGING, target.name)).mkdir()  # a leftover, which is told of
    log, broken = logging.getLogger("mbridge_fsdp_ckpt"), Broken()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(broken)
    try:
        dist.barrier()
        run.save()
        return run.ended()
    finally:
        log.removeHandler(broken)
        log.setLevel(level)


def _numpy_numbers(run: Run) -> Ended:
    given: Any = {"time_limit": np.float32(LIMIT_S), "storage_limit": np.int64(60), "staging_limit": np.int64(1 << 25)}
    run.settings = mbridge_fsdp_ckpt.Settings(**given)
    run.save()
    return run.ended()


# -- threads


def threads(root: str) -> dict[str, Ended]:
    """A thread of one rank does not start, or ends, by something that is no `Exception`; and a save that goes well."""
    run = Run(root)
    run.warm()
    start = threading.Thread.start
    failing: dict[str, tuple[Any, str, BaseException]] = {
        "none to be had": (threading.Thread, "start", RuntimeError("can't start new thread")),
        "copying": (Filling, "add", SystemExit(4)),
        "hearing": (SaveHandle, "hear", SystemExit(5)),
        "telling": (Channel, "send", MemoryError("no memory to send with")),
        "serving": (SaveHandle, "serve", SystemExit(6)),
    }
    found = {}
    for what, (owner, name, error) in failing.items():
        victim = 0 if what in ("hearing", "serving") else 1  # rank 0 alone is asked for files
        with _failing_once(owner, name, error) if dist.get_rank() == victim else _nothing():
            run.save(add_files=print)
            found[what] = run.ended()
        assert threading.Thread.start is start
        run.save()
        assert run.ended()["error"] is None, what
    return found


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _failing_once(owner: Any, name: str, error: BaseException) -> Iterator[None]:
    todo, whole = [error], getattr(owner, name)

    def once(*args: Any, **named: Any) -> Any:
        if todo:
            raise todo.pop()
        return whole(*args, **named)

    with patch.object(owner, name, once):
        yield


# -- what is left


def leaves_nothing(root: str) -> dict[str, Any]:
    """What is left of saves that have ended: of state, callbacks, threads, descriptors."""
    run = Run(root)
    run.warm()
    counted, kept = [], []
    for _ in range(4):
        called = _Callbacks()
        kept.append(weakref.ref(called))
        run.save(add_files=called.add_files, after_commit=called.after_commit)
        run.step()
        del called
        mbridge_fsdp_ckpt.finish_saves()
        counted.append(_counted())
    run.save(rank_values={"bad": {1, 2}} if dist.get_rank() == 1 else {})
    failed = run.ended()["error"]
    state = weakref.ref(next(iter(_slots(run.trainable.optimizer))))
    alive = state() is not None
    handle = async_saves()._writer
    del run
    for thread in threading.enumerate():
        if thread.name.startswith("save "):
            thread.join(60.0)
    gc.collect()
    return {
        "failed": failed,
        "was alive": alive,
        "state": state() is None,
        "callbacks": [called() for called in kept] == [None] * 4,
        "counted": counted,
        "writer": handle is not None,
    }


class _Callbacks:
    """Of a user."""

    def add_files(self, staging: Path) -> None:
        (staging / "own.txt").write_text("own")

    def after_commit(self) -> None:
        pass


def _slots(optimizer: Any) -> Iterator[torch.Tensor]:
    for inner in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        inner = getattr(inner, "optimizer", inner)
        for slots in inner.state.values():
            yield from (value for value in slots.values() if isinstance(value, torch.Tensor) and value.numel() > 1)


def _counted() -> dict[str, int]:
    """Once they have settled: threads of this process that save; threads and connections of its checkpoint process."""
    process, found, same = Path(f"/proc/{writer_pid()}"), dict[str, int](), 0
    deadline = time.monotonic() + 30.0
    while same < 3 and time.monotonic() < deadline:
        links = [str(link.readlink()) for link in (process / "fd").iterdir() if link.is_symlink()]
        new = {
            "own threads": sum(thread.name.startswith("save ") for thread in threading.enumerate()),
            "threads": len(list((process / "task").iterdir())),
            "sockets": sum(link.startswith("socket:") for link in links),
        }
        found, same = new, same + 1 if new == found else 0
        time.sleep(0.3)
    return found


# -- silence


def stopped(root: str) -> dict[str, Ended]:
    """This process is stopped, or its interpreter busy, for longer than its checkpoint process may be silent."""
    run = Run(root)
    run.warm()
    writer, found = writer_pid(), {}
    for what, stop in {"stopped": _stop_this, "busy": _hold_interpreter, "stopped again": _stop_this}.items():
        saving = run.save()
        saving.wait_until_taken()
        stop()
        found[what] = run.ended()
        dist.barrier()
    return {**found, "same": {"error": None if writer_pid() == writer else "another"}}


def _stop_this() -> None:
    """Of rank 1 alone: the others see no more than a checkpoint process that lives."""
    if dist.get_rank() == 1:
        with subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {LONG_S}; kill -CONT {os.getpid()}"]):
            pass


def _hold_interpreter() -> None:
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(int(LONG_S))


def suspended(root: str) -> Ended:
    """All of a job is suspended in the middle of copying, for longer than anybody waits."""
    run = Run(root)
    run.warm()
    run.settings = replace(QUICK, storage_limit=LIMIT_S)
    copying, go_on = threading.Event(), threading.Event()
    whole = Filling.add

    def add(filling: Filling, *what: Any) -> None:
        copying.set()
        go_on.wait(60.0)
        whole(filling, *what)

    with patch.object(Filling, "add", add):
        run.save()
        assert copying.wait(60.0)
        this, other = os.getpid(), writer_pid()
        time.sleep(0.5)  # it waits for what is copied
        stop = f"kill -STOP {this} {other}; sleep {LONG_S}; kill -CONT {other}; sleep 0.5; kill -CONT {this}"
        with subprocess.Popen(["sh", "-c", stop]):
            pass
        go_on.set()
        return run.ended()


# -- signals and starts


def signals(root: str) -> list[Any]:
    """Signals that schedulers send to all processes of a step, to a checkpoint process that starts, and one that saves.

    Returns:
        What the save came to, and what this thread blocks before and after.
    """
    sent = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    sent += [signal.SIGALRM, signal.SIGCONT, signal.SIGXCPU, signal.SIGRTMIN]
    run = Run(root, settings=replace(QUICK, time_limit=20.0))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run.save()
    for number in sent:
        run.writer(number)
    first = run.ended()["error"]
    run.writer(signal.SIGSTOP)
    run.save()
    for number in sent:
        if number != signal.SIGCONT:
            run.writer(number)
    run.writer(signal.SIGCONT)
    return [first, run.ended()["error"], before == signal.pthread_sigmask(signal.SIG_BLOCK, [])]


def dies_at_the_start(root: str, pids: str) -> None:
    """Killed as soon as its checkpoint process has been started, whose channel another process keeps open."""
    run = Run(root)
    run.save()
    writer = async_saves()._writer
    assert writer is not None
    end = writer._channel._socket.fileno()
    holder = subprocess.Popen(["sleep", "120"], pass_fds=[end])
    Path(pids).write_text(f"{writer.pid} {holder.pid}")
    os.kill(os.getpid(), signal.SIGKILL)


def paths(root: str, here: str) -> dict[str, Any]:
    """Where a checkpoint process finds its modules: as this process does, or the save fails by name."""
    Path(here).mkdir(exist_ok=True)
    package = Path(mbridge_fsdp_ckpt.__file__).parent
    other = Path(root, f"other-{dist.get_rank()}")
    shutil.copytree(package, other / package.name, ignore=shutil.ignore_patterns("__pycache__", "testing", "convert"))
    init = other / package.name / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    run, found = Run(root), {}
    (other / "queue.py").write_text(f"open({str(Path(here, 'ran'))!r}, 'w').close()\nraise SystemExit(7)\n")
    before = Path.cwd()
    os.chdir(other)
    try:
        with patch.dict(os.environ):
            os.environ.pop("PYTHONSAFEPATH", None)
            found["working directory"] = _new_writers(run)
        (other / "queue.py").unlink()
        with patch.dict(os.environ, {"PYTHONPATH": f"{other}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}):
            found["environment"] = _new_writers(run)
    finally:
        os.chdir(before)
    with patch.object(sys, "path", [str(other), *sys.path]) if dist.get_rank() == 1 else _nothing():
        found["another one"] = _new_writers(run)
    found["after"] = _new_writers(run)
    return found | {"ran": Path(here, "ran").exists()}


def _new_writers(run: Run) -> Ended:
    async_saves().stop()
    run.save()
    return run.ended()


# -- old errors


def old_errors(root: str) -> list[Any]:
    """What saves raise of the save before, asynchronously and not, and what `finish_saves` has left to raise."""
    run = Run(root)

    def fails(name: str) -> None:
        run.save(**({"rank_values": {name: {1, 2}}} if dist.get_rank() == 1 else {}))

    def raised(action: Callable[[], Any]) -> list[str]:
        try:
            action()
        except CheckpointError as error:
            return [str(error).partition("]")[0], *(note.partition("]")[0] for note in getattr(error, "__notes__", []))]
        return []

    def at_once() -> None:
        run.number += 1
        whole = {"model": run.trainable.model, "optimizer": run.trainable.optimizer}
        mbridge_fsdp_ckpt.save(iteration(root, run.number), settings=run.settings, **whole)

    found = []
    fails("one")
    found.append(raised(run.save))  # 2 is there
    found.append(raised(mbridge_fsdp_ckpt.finish_saves))
    fails("three")
    found.append(raised(at_once))  # 4 is there
    found.append(raised(at_once))
    fails("six")
    found.append(raised(lambda: fails("seven")))  # the newer one, with a note
    found.append(raised(mbridge_fsdp_ckpt.finish_saves))
    return found


def _held_up(run: Run) -> SaveHandle:
    """A save that is copied, whose checkpoint process is stopped."""
    run.warm()
    run.writer(signal.SIGSTOP)
    saving = run.save()
    saving.wait_until_taken()
    return saving


def in_unison(root: str) -> list[bool]:
    """Whether a save has ended, as ranks find at a step, of which one has asked more often than the other."""
    run = Run(root, settings=replace(QUICK, time_limit=30.0))
    saving = _held_up(run)
    found = [saving.ended_on_all("at step 1")] if dist.get_rank() == 1 else [False]
    dist.barrier()
    found.append(saving.ended_on_all("at step 2"))
    run.writer(signal.SIGCONT)
    saving.wait()
    dist.barrier()
    return [*found, saving.ended_on_all("at step 2"), saving.ended_on_all("at step 3")]


def in_order(root: str) -> list[Any]:
    """Saves that ask whether to skip, right behind one that did not, on a rank whose threads are slow.

    Returns:
        What both saves came to, and keys in the store after each of some more saves about which ranks ask at steps.
    """
    run = Run(root, settings=replace(QUICK, time_limit=10.0))
    copy = AsyncSaves._copy

    def late(*given: Any) -> None:
        time.sleep(1.0)
        copy(*given)

    with patch.object(AsyncSaves, "_copy", late) if dist.get_rank() == 1 else _nothing():
        first = run.save()
        run.settings = replace(run.settings, when_busy="skip")
        time.sleep(0.0 if dist.get_rank() == 1 else 0.3)  # rank 0 begins the first at once
        skipped = run.save().skipped
        first.wait()
    found: list[Any] = [skipped, first.error]
    run.settings = replace(run.settings, when_busy="wait")
    for _ in range(6):
        saving = run.save()
        saving.wait()
        dist.barrier()
        for step in range(3):
            saving.ended_on_all(f"at step {step}")
            dist.barrier()  # as a step of training is: nobody is two of them behind
        found.append(base_of(default_store()).num_keys())
        dist.barrier()
    return found


def interrupted(root: str) -> list[Any]:
    """A signal ends the wait for a save, and the program saves once more: what both come to."""
    run = Run(root, settings=replace(QUICK, time_limit=20.0))
    first = _held_up(run)
    before = signal.signal(signal.SIGALRM, _raises(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    found: list[Any] = []
    try:
        mbridge_fsdp_ckpt.finish_saves()
    except KeyboardInterrupt:
        found.append("interrupted")
    finally:
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {writer_pid()}"]):
        second = run.save()
    assert second is not None
    second.wait()
    return [*found, first.done, first.error, second.error]

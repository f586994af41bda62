# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A pool's processes, seen from the pool: the template, and the workers forked from it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import mbridge_fsdp_ckpt
from testing.messages import Case, CleanUp, Fork, Reap

_LOG_TAIL_BYTES = 8_000
_STACK_WAIT_S = 3.0
_END_WAIT_S = 5.0

_FIXED_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}


def rank_environment() -> dict[str, str]:
    """The environment in which Transformer Engine loads, Megatron is deterministic, and nothing is compiled."""
    roots = dict.fromkeys([str(Path(__file__).parents[1]), str(Path(mbridge_fsdp_ckpt.__path__[0]).parent)])
    return {
        **os.environ,
        **_FIXED_ENVIRONMENT,
        "LD_LIBRARY_PATH": _joined([*_cuda_library_folders(), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": _joined([*roots, os.environ.get("PYTHONPATH", "")]),
    }


def _cuda_library_folders() -> list[str]:
    """Where torch's wheel puts the libraries that Transformer Engine is linked against."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec is not None else []
    folders = [root / part / "lib" for root in roots for part in ("nccl", "cudnn", "cu13")]
    return [str(folder) for folder in folders if folder.is_dir()]


def _joined(entries: Sequence[str]) -> str:
    return os.pathsep.join(entry for entry in entries if entry)


class TemplateProcess:
    """The process that imports what the workers need; it ends with the thread that started it, and they with it."""

    def __init__(self, log: Path, preload: Sequence[str], environment: dict[str, str], start_limit: float) -> None:
        self._log = log
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "testing.template"]
        command += ["--pipe", str(theirs.fileno()), "--parent", str(os.getpid()), "--preload", *preload]
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the keyboard is for the pool alone
            )
        self._wait_until_ready(start_limit)

    def _wait_until_ready(self, limit: float) -> None:
        try:
            if self._connection.poll(limit):
                self._connection.recv()
                return
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_WAIT_S)
            what = f"was not ready after {limit:g} s"
        except EOFError:
            what = f"ended with return code {self._process.wait()} while it started"
        self.kill()
        raise RuntimeError(f"the process that workers are forked from {what}; it printed\n{_tail(self._log, 0)}")

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fork(self, rank: int, folder: Path) -> WorkerProcess:
        """A new worker for `rank`, which prints to files in `folder`."""
        log, stacks = folder / f"rank{rank}.log", folder / f"rank{rank}.stacks"
        log.touch()
        stacks.write_bytes(b"")
        ours, theirs = Pipe()
        with theirs:
            self._connection.send(Fork(log, stacks))
            send_handle(self._connection, theirs.fileno(), self._process.pid)
            process_id: int = self._connection.recv()
        return WorkerProcess(self, process_id, ours, log, stacks)

    def reap(self, process_id: int) -> int:
        """Wait for a worker that has ended or is about to; return minus the signal, or the exit status."""
        self._connection.send(Reap(process_id))
        returncode: int = self._connection.recv()
        return returncode

    def kill(self) -> None:
        """End the process, and with it its workers."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class WorkerProcess:
    """A worker that was started, and may have ended since."""

    def __init__(
        self, template: TemplateProcess, process_id: int, connection: Connection[Any, Any], log: Path, stacks: Path
    ) -> None:
        self.process_id = process_id
        self.connection = connection
        self._template = template
        self._log, self._stacks = log, stacks
        self._log_start = 0
        self._handle = os.pidfd_open(process_id)
        self._returncode: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._returncode is None and not self._ends_within(0.0)

    @property
    def threads(self) -> int:
        """How many threads the process has."""
        return len(list(Path(f"/proc/{self.process_id}/task").iterdir()))

    def _ends_within(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(seconds * 1_000))

    def returncode(self) -> int:
        """How the process ended, once it has or is about to: minus the signal that killed it, or its exit status."""
        if self._returncode is None:
            if not self._ends_within(_END_WAIT_S):
                self._signal(signal.SIGKILL)
            self._returncode = self._template.reap(self.process_id)
        return self._returncode

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def serve(self, case: Case) -> None:
        """Send a case to the waiting worker.  From now on `log_tail` tells what this case printed."""
        self._log_start = self._log.stat().st_size
        self.connection.send(case)

    def clean_up(self) -> None:
        """Ask the worker to clean up after its case; if it is gone, its end is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(CleanUp())

    def log_tail(self) -> str:
        """The end of what the process printed since the last case began."""
        return _tail(self._log, self._log_start)

    def stacks(self) -> str:
        """The Python stacks of all threads, right now; works while the process is stuck in C code."""
        before = self._stacks.stat().st_size
        self._signal(signal.SIGUSR1)
        deadline, size = time.monotonic() + _STACK_WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            grown = self._stacks.stat().st_size
            if grown == size > before:
                break
            size = grown
        text = self._stacks.read_bytes()[before:].decode(errors="replace").strip()
        return text or "(the process does not answer: it is stopped, or has ended)"

    def kill(self) -> None:
        """End the process and whatever it started."""
        if self._returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may not lead a group of its own yet
                os.killpg(self.process_id, signal.SIGKILL)
            self._signal(signal.SIGKILL)
            if self._template.is_alive:
                self.returncode()
        self.connection.close()
        os.close(self._handle)


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()

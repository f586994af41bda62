"""One worker process, seen from the pool: its environment, log, stacks and end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.testing.messages import Case, CleanUp

_LOG_TAIL_BYTES = 8_000
_STACK_WAIT_S = 3.0

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


def worker_environment() -> dict[str, str]:
    """The environment in which Transformer Engine loads, Megatron is deterministic, and nothing is compiled."""
    package_root = str(Path(mbridge_fsdp_ckpt.__path__[0]).parent)
    return {
        **os.environ,
        **_FIXED_ENVIRONMENT,
        "LD_LIBRARY_PATH": _joined([*_cuda_library_folders(), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": _joined([package_root, os.environ.get("PYTHONPATH", "")]),
    }


def _cuda_library_folders() -> list[str]:
    """Where torch's wheel puts the libraries that Transformer Engine is linked against."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec is not None else []
    folders = [root / part / "lib" for root in roots for part in ("nccl", "cudnn", "cu13")]
    return [str(folder) for folder in folders if folder.is_dir()]


def _joined(entries: Sequence[str]) -> str:
    return os.pathsep.join(entry for entry in entries if entry)


class WorkerProcess:
    """A worker that was started, and may have ended since."""

    def __init__(self, rank: int, folder: Path, preload: Sequence[str]) -> None:
        self.rank = rank
        self._log = folder / f"rank{rank}.log"
        self._stacks = folder / f"rank{rank}.stacks"
        self._log_start = 0
        ours, theirs = Pipe()
        self.connection: Connection[Any, Any] = ours
        command = [sys.executable, "-m", "mbridge_fsdp_ckpt.testing.worker"]
        command += ["--pipe", str(theirs.fileno()), "--parent", str(os.getpid()), "--stacks", str(self._stacks)]
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [*command, "--preload", *preload],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that kill() reaches what the code under test started
            )

    @property
    def process_id(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def returncode(self) -> int:
        """How the process ended, once it has or is about to: minus the signal that killed it, or its exit status."""
        return self._process.wait(timeout=30)

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until the imports are done; RuntimeError with the log where they fail or take too long."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"the worker of rank {self.rank} did not start in time; it is at\n{self.stacks()}")
        try:
            self.connection.recv()
        except EOFError:
            ended = f"the worker of rank {self.rank} ended with return code {self.returncode()} while it started"
            raise RuntimeError(f"{ended}; it printed\n{self.log_tail()}") from None

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
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def stacks(self) -> str:
        """The Python stacks of all threads, right now; works while the process is stuck in C code."""
        before = self._stacks.stat().st_size
        self._process.send_signal(signal.SIGUSR1)
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

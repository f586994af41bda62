"""The process behind one rank of a `RankPool`: it serves one case after another.

Everything is said over a private pipe; what the code under test prints goes to the log that the pool set up as
standard output and error.  SIGUSR1 makes the process write the stacks of all its threads to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.testing.messages import Case, Cleaned, CleanUp, Raised, Ready, Returned

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start up, then serve cases until the pool closes its end of the pipe."""
    arguments = _parse_arguments()
    _die_with_parent(arguments.parent)
    with arguments.stacks.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection: Connection[Any, Any] = Connection(arguments.pipe)
        _prepare(arguments.preload)
        connection.send(Ready())
        _serve(connection)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of this end of the pipe")
    parser.add_argument("--parent", type=int, required=True, help="process id of the pool")
    parser.add_argument(
        "--stacks", type=Path, required=True, help="file that SIGUSR1 writes the stacks of all threads to"
    )
    parser.add_argument("--preload", nargs="*", default=[], help="modules to import before CUDA is replaced")
    return parser.parse_args()


def _die_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends: no worker outlives a killed test run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _prepare(preload: list[str]) -> None:
    """Import, then replace CUDA: Transformer Engine and torch.compile look at the real one when imported."""
    for module in preload:
        importlib.import_module(module)
    from mbridge_fsdp_ckpt.testing import cleanup, cpu_cuda

    cpu_cuda.install()
    cleanup.seed()
    gc.collect()
    gc.freeze()  # the collection after each case then skips what the imports made


def _serve(connection: Connection[Any, Any]) -> None:
    from mbridge_fsdp_ckpt.testing import cleanup

    environment, directory = dict(os.environ), Path.cwd()
    with contextlib.suppress(EOFError):
        while True:
            message: Case | CleanUp = connection.recv()
            if isinstance(message, Case):
                connection.send(_outcome(message))
            else:
                connection.send(Cleaned(cleanup.forget_case(environment, directory)))


def _outcome(case: Case) -> Returned | Raised:
    try:
        sys.path.extend(entry for entry in case.sys_path if entry not in sys.path)
        function = case.function.find()
        args, kwargs = case.call_arguments()
        _join_world(case)
        return Returned(pickle.dumps(function(*args, **kwargs)))
    except BaseException:  # a SystemExit or KeyboardInterrupt of a case is its failure, not ours
        return Raised(traceback.format_exc())


def _join_world(case: Case) -> None:
    """Set the environment that torchrun would, and initialise the process group unless the case does so itself."""
    os.environ.update(
        RANK=str(case.rank),
        LOCAL_RANK=str(case.rank),
        WORLD_SIZE=str(case.world_size),
        LOCAL_WORLD_SIZE=str(case.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(case.store_port),
        # The pool runs the store, so no rank has to, and no port can be taken between being chosen and being used.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if not case.process_group:
        return
    from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=case.timeout_s)
    store = TCPStore("127.0.0.1", case.store_port, is_master=False, timeout=timeout)
    init_process_group("gloo", store=store, rank=case.rank, world_size=case.world_size, timeout=timeout)


if __name__ == "__main__":
    main()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The process that a rank pool's workers are forked from: `python -m testing.template`.

Importing Megatron-Bridge takes 20 s of one core and 1 GiB.  Here it happens once, however many workers a pool has
and however often they are killed.  Nothing that the imports do may start threads: a fork keeps only one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn

from testing.messages import Fork, Ready, Reap

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import, then fork a worker whenever the pool asks for one, until the pool closes its end of the pipe."""
    arguments = _parse_arguments()
    _die_with_parent(arguments.parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection: Connection[Any, Any] = Connection(arguments.pipe)
    _prepare(arguments.preload)
    connection.send(Ready())
    with contextlib.suppress(EOFError):
        while True:
            request: Fork | Reap = connection.recv()
            connection.send(_fork(request, connection) if isinstance(request, Fork) else _reap(request))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of this end of the pipe")
    parser.add_argument("--parent", type=int, required=True, help="process id of the pool")
    parser.add_argument("--preload", nargs="*", default=[], help="modules to import before CUDA is replaced")
    return parser.parse_args()


def _die_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends: nothing outlives a killed test run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _prepare(preload: list[str]) -> None:
    """Import, then replace CUDA: Transformer Engine and torch.compile look at the real one when imported."""
    for module in preload:
        importlib.import_module(module)
    from testing import collectives, cpu_cuda, fresh_memory, kernels, worker  # noqa: F401

    cpu_cuda.install()
    collectives.watch_collectives()
    if "megatron.core" in sys.modules:
        kernels.look_for_kernels()
    gc.collect()
    gc.freeze()  # the collection after each case then skips what the imports made, and leaves its memory shared


def _fork(request: Fork, connection: Connection[Any, Any]) -> int:
    pipe = recv_handle(connection)
    template = os.getpid()
    process_id = os.fork()
    if process_id == 0:
        connection.close()
        _become_worker(request, Connection(pipe), template)
    os.close(pipe)
    return process_id


def _become_worker(request: Fork, connection: Connection[Any, Any], template: int) -> NoReturn:
    from testing.worker import serve

    _die_with_parent(template)
    os.setsid()  # so that the pool reaches what the code under test starts, too
    with request.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with request.stacks.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        serve(connection)
    os._exit(0)


def _reap(request: Reap) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(request.process_id, 0)[1])


if __name__ == "__main__":
    main()

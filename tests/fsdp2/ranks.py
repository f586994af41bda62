# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks of torch alone: processes over gloo in which `megatron` cannot be imported, that run case after case.

The pools of `testing` stand in for CUDA and import Megatron; here nothing is replaced.  The ranks of a world start
once: importing torch takes longer than most cases.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

LIMIT_S = 120.0
_FORBIDDEN = ("megatron", "megatron_fsdp", "transformer_engine")


class NotInstalled(MetaPathFinder):
    """As if some packages were not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise where one of them is asked for."""
        if fullname.split(".")[0] in _FORBIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class Ranks:
    """A world of ranks.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._waits = True
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store.port, there))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    @property
    def is_of_use(self) -> bool:
        """Whether all ranks wait for a case."""
        return self._waits

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module returns on each rank.

        Raises:
            AssertionError: It raised on some, or took too long; the world is of no use any more then.
        """
        self._waits = False
        for connection in self._connections:
            connection.send((case, arguments))
        found: dict[int, Any] = {}
        while len(found) < len(self._connections):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in found]
            ready = wait(waiting, timeout=LIMIT_S)
            assert ready, f"{case.__name__} hangs on ranks {sorted(set(range(len(self._connections))) - found.keys())}"
            for rank in [rank for rank, connection in enumerate(self._connections) if connection in ready]:
                raised, found[rank] = pickle.loads(self._connections[rank].recv_bytes())
                assert not raised, f"rank {rank}: {found[rank]}"
        self._waits = True
        return [found[rank] for rank in range(len(found))]

    def close(self) -> None:
        """End all ranks."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    sys.meta_path.insert(0, NotInstalled())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=TCPStore("127.0.0.1", port))
    while True:
        try:
            case, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = False, case(*arguments)
        except BaseException:
            answer = True, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))  # not as torch sends tensors, in memory that both share
    os._exit(0)  # gloo's threads would wait for each other

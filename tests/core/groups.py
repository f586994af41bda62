# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of replica groups: of the connections alone, without a checkpoint."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.coordination.coordination import Coordination, next_coordination
from mbridge_fsdp_ckpt.errors import RankMissingError
from mbridge_fsdp_ckpt.loading.exchange import _ReplicaGroup

ON_ITS_WAY = 1 << 20
"""Bytes of each rank: more than a socket takes at once."""
ARRIVES_S = 0.5  # what was sent is there; nothing tells when
ENDS_S = 10.0


def whose_operation_broke() -> dict[str, Any]:
    """Rank 1 leaves while rank 0 waits for it; then ranks 2 and 3 send to rank 0, which has given up."""
    coordination = next_coordination("nothing", time_limit=ENDS_S)
    with coordination.another_connection() as store:
        rank, group = coordination.rank, _joined(coordination, store)
    dist.barrier()
    if rank == 0:
        _begin(group)
    dist.barrier()
    if rank == 1:
        group.leave()
    found = _end(group) if rank == 0 else None
    dist.barrier()
    if rank in (2, 3):
        _begin(group)
        time.sleep(ARRIVES_S)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        group.leave()
    seconds = time.monotonic() - begin
    found = _end(group) if rank in (2, 3) else found
    group.leave()
    return {"found": found, "seconds": seconds}


def requests_of_joining(interfaces: str = "") -> int:
    """Requests to the job's store that a rank makes to join a replica group of all, over these interfaces."""
    coordination = next_coordination("nothing", time_limit=ENDS_S)
    with coordination.another_connection() as store, patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": interfaces}):
        counting = _Counting(store)
        group = _joined(coordination, counting)
    dist.barrier()
    group.leave()
    return counting.requests


class _Counting:
    """A store that counts what it is asked for; waits that ended without an answer are asked again and not counted."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def set(self, key: str, value: Any) -> None:
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return bytes(self._store.get(key))

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)
        self.requests += 1

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return list(self._store.multi_get(keys))

    def has_extended_api(self) -> bool:
        return True


def _joined(coordination: Coordination, store: Any) -> _ReplicaGroup:
    group = _ReplicaGroup(tuple(range(coordination.world_size)), coordination)
    group.join(store)
    group.compare("a plan")
    return group


def _begin(group: _ReplicaGroup) -> None:
    own = torch.zeros(ON_ITS_WAY, dtype=torch.uint8)
    group._begin(own, [torch.empty_like(own) for _ in group.ranks])


def _end(group: _ReplicaGroup) -> str:
    try:
        group._finish()
    except RankMissingError as error:
        return str(error)
    raise AssertionError("a peer had left")

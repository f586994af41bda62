# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""gloo's connections of a load's own: all with all, of ranks that read for each other.  gloo is touched here alone.

They are made at once, not when they are used: a lazy group of gloo's that broke can't be closed.  Its end waits until
nothing more arrives, and what a peer sent into an operation that has failed stays there, unread, for ever (seen with
torch 2.13; `tests/core/test_groups.py`).
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mbridge_fsdp_ckpt.coordination.connection import Store
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.meeting import a_while, values, wait_for


def connected(store: Store, name: str, place: int, size: int, coordination: Coordination) -> Any:
    """A group of gloo's, registered nowhere; its threads and connections end with it.

    Args:
        store: The job's, over a connection of the load's own: gloo waits in it.
        name: The name of the group; only its members use keys below it.
        place: This rank's in the group.
        size: Members.
        coordination: The load's: how long to wait, and for whom.

    Raises:
        RuntimeError: A member does not answer.
    """
    gloo = cast("Any", distributed_c10d.ProcessGroupGloo)  # the stubs lack the half of it
    interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    options._timeout = timedelta(seconds=coordination.time_limit)
    return gloo(_Addresses(store, name, place, size, coordination), place, size, options)


def gather(group: Any, own: Any, everybodys: list[Any], limit: float) -> Any:
    """Begin an all-gather of `own`, tensors in host memory, into `everybodys`.

    Args:
        group: What `connected` returned.
        own: This rank's, of one dimension.
        everybodys: Tensors of the same shape to receive into, one for each member.
        limit: Seconds after which gloo itself gives up.

    Raises:
        RuntimeError: A connection is lost.
    """
    options = distributed_c10d.AllgatherOptions()
    options.timeout = timedelta(seconds=limit)
    return group.allgather([everybodys], [own], options)


class _Addresses(dist.Store):
    """What gloo asks a store for while it connects: what each member has published, of one interface after the other.

    gloo asks for one member's after the other; here they are fetched together, in three requests a rank instead of two
    for each member, and a rank that waits for them looks for heartbeats.
    """

    def __init__(self, store: Store, name: str, place: int, size: int, coordination: Coordination) -> None:
        super().__init__()
        self._store, self._name, self._place, self._size, self._coordination = store, name, place, size, coordination
        self._published: dict[str, str] = {}
        self._found: dict[str, str] = {}
        self._rounds = 0

    def set(self, key: str, value: Any) -> None:  # bytes, which the stubs don't know
        self._published[key] = b64encode(value).decode()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self._found.keys() >= set(keys):
            self._exchange()
        if missing := set(keys) - self._found.keys():
            raise RuntimeError(f"no member has published {sorted(missing)}")

    def get(self, key: str) -> bytes:
        return b64decode(self._found[key])

    def _exchange(self) -> None:
        """Publish what this rank has to, and fetch what all have."""
        self._rounds += 1
        everybodys, watch = [self._key(place) for place in range(self._size)], self._coordination.watch()
        self._store.set(everybodys[self._place], json.dumps(self._published))
        self._coordination.keys.append(everybodys[self._place])
        while not wait_for(self._store, everybodys, a_while(self._coordination.time_limit)):
            if watch.over():
                raise RuntimeError(f"not all have come within {self._coordination.time_limit:g} s")
        self._published = {}
        self._found |= {key: value for one in values(self._store, everybodys) for key, value in json.loads(one).items()}

    def _key(self, place: int) -> str:
        return f"{self._name}/{self._rounds}/{place}"

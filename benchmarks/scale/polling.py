# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The protocol before the one on a tree, as short as it can be told: everybody polls, rank 0 handles every message."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def meet(store: Any, name: str, rank: int, world: int, message: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """One meeting in which nobody fails."""
    store.set(f"{name}/{rank}", json.dumps(message))
    store.add(f"{name}/arrived", 1)
    pauses = _Pauses(store)
    if rank:
        while not store.check([f"{name}/decision"]):
            store.check([f"{name}/outcome"])
            pauses.next()
        return json.loads(store.get(f"{name}/decision"))
    while store.add(f"{name}/arrived", 0) < world:
        store.check([f"{name}/failed"])
        pauses.next()
    decision = decide([json.loads(store.get(f"{name}/{other}")) for other in range(world)])
    store.compare_set(f"{name}/outcome", "", "fenced")
    store.set(f"{name}/decision", json.dumps(decision))
    for other in range(world):
        store.delete_key(f"{name}/{other}")
    return decision


class _Pauses:
    """Between looks; a look at the heartbeats once a second."""

    def __init__(self, store: Any) -> None:
        self._store, self._pause, self._next_look = store, 0.005, time.monotonic()

    def next(self) -> None:
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, 0.2)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 1.0
            self._store.add("beats", 0)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a rank asks of the rendezvous store in a whole save, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.coordination import incarnation
from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.coordination.incarnation import Incarnation
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.models import Recipe
from tests.core import cases


class Counting:
    """A store that counts requests by what they are and the last word of their key."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def request(keys: Any, *arguments: Any) -> Any:
            key = keys if isinstance(keys, str) else keys[0]
            self.requests[f"{name} {key.rpartition('/')[2]}"] += 1
            return getattr(self.store, name)(keys, *arguments)

        return request if name != "has_extended_api" else self.store.has_extended_api


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Requests of this process's connections while the block runs."""
    found = Counter[str]()
    plain = incarnation.client

    def client(*arguments: Any) -> Any:
        counting = Counting(plain(*arguments))
        counting.requests = found
        return counting

    with patch.object(incarnation, "client", client), patch.object(incarnation, "_current", None):
        yield found


def of_saves(directory: str, saves: int) -> list[dict[str, int]]:
    """This rank's requests of its process's first saves, one after the other."""
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    found = []
    with counted() as requests:
        for number in range(saves):
            mbridge_fsdp_ckpt.save(f"{directory}.{number}", model=trainable.model, optimizer=trainable.optimizer)
            found.append(dict(requests))
            requests.clear()
    return found


def of_calls() -> tuple[int, list[str]]:
    """The requests of two calls of asynchronous saves, and the names of these, each asked for twice."""
    with counted() as requests:
        participants = [Participant.next(f"save {number}", 60, 60) for number in range(2)]
        asked = requests.total()
        names = {participant.purpose: participant.name for participant in participants}
        assert names == {participant.purpose: participant.name for participant in reversed(participants)}
    return asked, [names[participant.purpose] for participant in participants]


def without_an_answer(directory: str, error: Exception) -> tuple[str, bool]:
    """An asynchronous save whose thread gets an error of the store: what it says, and if the next is saved."""
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    whole: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    refused = ""
    with patch.object(Incarnation, "join", side_effect=error):
        saving = mbridge_fsdp_ckpt.async_save(f"{directory}.1", **whole)
        trainable.step(1)
        try:
            saving.result()
        except CheckpointError as named:
            refused = str(named)
    return refused, mbridge_fsdp_ckpt.async_save(f"{directory}.2", **whole).result().bytes > 0

"""What a rank asks of the rendezvous store in a whole save, and when."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.agree import agreement, elsewhere
from mbridge_fsdp_ckpt.agree.elsewhere import Seat, served_store
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.testing.models import Recipe
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


def of_two_saves(directory: str) -> list[dict[str, int]]:
    """This rank's requests of its process's first save, and of its second."""
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    counted = []
    plain = agreement.default_store()
    for number in range(2):
        store = Counting(plain)
        with patch.object(agreement, "default_store", lambda store=store: store):
            mbridge_fsdp_ckpt.save(f"{directory}.{number}", model=trainable.model, optimizer=trainable.optimizer)
        counted.append(dict(store.requests))
    return counted


def of_calls() -> tuple[int, list[str]]:
    """The requests of two calls of saves beside the training, and the names of these; half of the ranks ask the later
    one first."""
    rank = dist.get_rank()
    counter = f"mbridge_fsdp_ckpt/0/{rank}/beside"
    before = served_store().add(counter, 0)
    seats = [Seat.next(f"save {number}", 60, 60) for number in range(2)]
    asked = served_store().add(counter, 0) - before
    names = {seat.purpose: seat.name for seat in (reversed(seats) if rank % 2 else seats)}
    return asked, [names[seat.purpose] for seat in seats]


def without_an_answer(directory: str, error: Exception) -> tuple[str, bool]:
    """A save beside the training whose thread gets an error of the store: what it says, and if the next is saved."""
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    whole: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer, "background": True}
    refused = ""
    with patch.object(elsewhere, "next_name", side_effect=error):
        saving = mbridge_fsdp_ckpt.save(f"{directory}.1", **whole)
        trainable.step(1)
        try:
            saving.result()
        except CheckpointError as named:
            refused = str(named)
    return refused, mbridge_fsdp_ckpt.save(f"{directory}.2", **whole).result().bytes > 0

"""What a rank asks of the rendezvous store in a whole save."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.agree import agreement
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

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Meetings in tests: one of functions, and any of them held without a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.coordination.rounds import Round


def joined(messages: list[Any]) -> list[Any]:
    return [one for message in messages for one in message]


@dataclass
class Asked(Round[Any, Any]):
    """A meeting of functions."""

    phase: str
    brought: Any
    decides: Callable[[Any], Any]
    combines: Callable[[list[Any]], Any] = joined

    def message(self) -> Any:
        return self.brought

    def combine(self, messages: list[Any]) -> Any:
        return self.combines(messages)

    def decide(self, whole: Any) -> Any:
        return self.decides(whole)


def met[V](rounds: Sequence[Round[Any, V]]) -> V:
    """What rank 0 decides, of messages that passed through the store."""
    return rounds[0].decide(rounds[0].combine(json.loads(json.dumps([round.message() for round in rounds]))))

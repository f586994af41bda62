# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do where the ranks begin different things, or rank 0, which serves the store, leaves at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.coordination import heartbeat, incarnation, meeting
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import MegatronFsdpReader
from testing.models import Recipe
from testing.ranks import no_process_group
from tests.core import cases

RECIPE = Recipe(layers=1)
SLOW_S = 0.7  # before rank 1 waits: rank 0 has long left

What = Literal["save", "load", "failed save"]


@no_process_group
def last_word(directory: str, what: What, port: int) -> Any:
    """A plain env:// job whose rank 0 ends right after its last save or load; what rank 1 saw, then and after that."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    dist.init_process_group("gloo", init_method="env://")
    trainable = cases.prepared(RECIPE, steps=1)
    if what == "load":
        mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    first = dist.get_rank() == 0
    with patch.object(meeting, "wait_for", meeting.wait_for if first else _slowly(meeting.wait_for)):
        try:
            if what == "load":
                _load_without_refresh(directory, trainable)
            else:
                values = {"bad": object()} if what == "failed save" else {}
                mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, values=values)
        except CheckpointError as error:
            seen = f"{type(error).__name__}: {error}"
        else:
            seen = "done"
    if first:
        os._exit(0)
    return seen, _next_save(directory, trainable)


def _slowly(wait_for: Callable[..., bool]) -> Callable[..., bool]:
    def late(*arguments: Any) -> bool:
        time.sleep(SLOW_S)
        return wait_for(*arguments)

    return late


def _next_save(directory: str, trainable: Any) -> str:
    """What a save says once the store has gone."""
    store = incarnation.default_store()
    try:
        while True:
            store.add("is anybody there", 0)
            time.sleep(0.05)
    except heartbeat.STORE_ERRORS as gone:
        print(f"rank 0 has gone: {gone}")
    try:
        mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def _load_without_refresh(directory: str, trainable: Any) -> None:
    """A load's last meeting; the gather of compute weights after it is a collective, which keeps ranks together."""
    with patch.object(MegatronFsdpReader, "refresh", lambda reader: None):
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)


def begin(calls: dict[int, tuple[str, str]]) -> list[str]:
    """Each rank calls save or load of a directory of its own; the error, and then what a common save says."""
    trainable = cases.prepared(RECIPE, steps=1)
    what, directory = calls[dist.get_rank()]
    action: Any = getattr(mbridge_fsdp_ckpt, what)
    seen = []
    for call, place in ((action, directory), (mbridge_fsdp_ckpt.save, f"{calls[0][1]}.common")):
        try:
            call(place, model=trainable.model, optimizer=trainable.optimizer)
        except CheckpointError as error:
            seen.append(f"{type(error).__name__}: {error}")
        else:
            seen.append("done")
    return seen

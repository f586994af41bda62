# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which saved slots fit the slots that a live optimizer keeps: a table, without a checkpoint on disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mbridge_fsdp_ckpt.errors import KeyMismatchError
from mbridge_fsdp_ckpt.format.source import CheckpointSource
from mbridge_fsdp_ckpt.live.optimizer.base import SlotSpec
from mbridge_fsdp_ckpt.loading.match import LiveState, Match
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import plan_parameter
from mbridge_fsdp_ckpt.settings import Settings

KEY = "optimizer.state.module.w.exp_avg"
ADAM, OWN = "torch.optim.adamw.AdamW", "mine.Adam"
SCALED = SlotSpec("sharded", torch.float32, torch.float16)


def matched(
    weight: str, saved: KeyEntry, live: SlotSpec | None, *, class_name: str = ADAM, settings: Settings | None = None
) -> str:
    """What is wrong with a checkpoint of one parameter with one slot; "" where nothing is."""
    layout = ParameterLayout("w", "module.w", (4, 2), None, Axis(0, 1), FlatRange(0, 8), Axis(0, 1))
    keys = {"model.w": KeyEntry(dtype=weight, shape=(4, 2)), KEY: saved}
    metadata = SimpleNamespace(keys=keys, sections=("model", "optimizer"))
    source = SimpleNamespace(metadata=metadata, slots=lambda name: {"exp_avg": saved}, stateless=lambda names: set())
    match = Match(cast("CheckpointSource", source), settings or Settings(), everything=False)
    slots = None if live is None else {"exp_avg": live}
    state = LiveState(slots, class_name, counts_elsewhere=False, counted=False)
    match.slots(plan_parameter(layout, None), lambda kept_by: state)
    try:
        match.finish()
    except KeyMismatchError as error:
        return error.found
    return ""


def entry(dtype: str, **more: Any) -> KeyEntry:
    return KeyEntry(dtype=dtype, shape=(4, 2), **more)


@pytest.mark.parametrize(
    ("weight", "saved", "live", "says"),
    [
        ("float32", entry("float32", kept_as="float32"), SlotSpec("sharded", torch.float32), ""),
        ("float32", entry("bfloat16", kept_as="bfloat16"), SlotSpec("sharded", torch.float32), ""),
        ("float32", entry("float32", kept_as="float32"), SlotSpec("sharded", torch.bfloat16), "allow_cast must name"),
        ("float32", entry("float32"), SlotSpec("sharded", torch.bfloat16), "allow_cast must name"),
        ("float32", entry("float32", kept_as="float16"), SCALED, ""),
        ("float32", entry("float32", kept_as="float32"), SCALED, "allow_cast must name"),
        ("float32", entry("float32"), SCALED, ""),  # of stock and of conversions nobody knows
        ("float32", entry("float16"), SCALED, "without its scale, which stock does not save"),
        ("float32", entry("float16"), SlotSpec("sharded", torch.float32), "without its scale"),
        ("float16", entry("float16"), SlotSpec("sharded", torch.float16), ""),
        ("float32", entry("int16"), SlotSpec("sharded", torch.float32), "int16 in the checkpoint"),
    ],
)
def test_a_slot_fits_or_says_why_not(weight: str, saved: KeyEntry, live: SlotSpec, says: str) -> None:
    found = matched(weight, saved, live)
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("kept_by", "class_name", "fits"),
    [
        (OWN, OWN, True),
        (OWN, "__main__.Adam", True),  # the class has moved
        (OWN, "mine.Lion", False),
        (None, OWN, False),  # kept by one of torch's or Transformer Engine's
    ],
)
def test_state_of_a_class_of_ones_own_is_known_by_its_name(kept_by: str | None, class_name: str, fits: bool) -> None:
    saved = entry("float32", kept_as="float32", kept_by=kept_by)
    found = matched("float32", saved, None, class_name=class_name)
    assert (found == "") == fits
    assert matched("float32", saved, None, class_name=class_name, settings=Settings(allow_cast=(KEY,))) == ""


def test_of_a_checkpoint_that_names_no_class_everything_is_taken() -> None:
    assert matched("float32", entry("float32"), None, class_name=OWN) == ""

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a training process tells its checkpoint process of a save, as JSON-able data."""

from __future__ import annotations

from typing import Any, cast

from mbridge_fsdp_ckpt.coverage.plans import Block
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.rows import Scalar
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.saving.write_plan import WritePlan

_SAID = "coordinates", "parameters", "stateless", "states", "param_groups"

Layout = tuple[list[Block], dict[str, KeyEntry]]
"""What is the same from save to save: blocks and keys.  Values never are."""


def layout_of(write_plan: WritePlan) -> Layout:
    """The part that a checkpoint process may keep for the next save."""
    return write_plan.blocks, write_plan.keys


def layout_to_wire(layout: Layout) -> dict[str, Any]:
    """A layout as data; each description once, however many keys share it."""
    blocks, keys = layout
    known: dict[KeyEntry, int] = {}
    numbers = {key: known.setdefault(entry, len(known)) for key, entry in keys.items()}
    entries = [entry.model_dump() for entry in known]
    return {"blocks": [block.to_wire() for block in blocks], "keys": numbers, "entries": entries}


def layout_from_wire(data: dict[str, Any]) -> Layout:
    """What `layout_to_wire` gave."""
    entries = [KeyEntry.model_validate(entry) for entry in data["entries"]]
    return list(map(Block.from_wire, data["blocks"])), {key: entries[number] for key, number in data["keys"].items()}


def to_wire(write_plan: WritePlan) -> dict[str, Any]:
    """All but the layout."""
    said = write_plan.said
    return {
        "numbers": [[number.key, number.data.hex(), number.counts] for number in write_plan.numbers],
        "fingerprint": write_plan.fingerprint,
        "said": {name: getattr(said, name) for name in _SAID},
        "own": said.own.model_dump(),
        "hyperparameters": {str(hashed): values for hashed, values in write_plan.hyperparameters.items()},
        "sections": list(write_plan.sections),
        "topology": write_plan.topology,
    }


def from_wire(data: dict[str, Any], layout: Layout, rank: int) -> WritePlan:
    """What `to_wire` and `layout_to_wire` gave."""
    blocks, keys = layout
    said = RankIndex(rank=rank, payload=None, keys={}, own=RankOwn.model_validate(data["own"]), **data["said"])
    return WritePlan(
        blocks=blocks,
        keys=keys,
        numbers=[Scalar(key, bytes.fromhex(value), counts) for key, value, counts in data["numbers"]],
        fingerprint=data["fingerprint"],
        said=said,
        hyperparameters={int(hashed): values for hashed, values in data["hyperparameters"].items()},
        sections=cast("Any", tuple(data["sections"])),
        topology=data["topology"],
    )

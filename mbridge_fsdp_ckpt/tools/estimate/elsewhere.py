# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A load in another layout: what the planned ranks of one job would read of the records that another job wrote.

A load verifies, and so reads, every hashed block of a record that it uses a part of (`plan.records`).  A block that is
cut between two writers (`plan.shares`) counts as if one had written it: of each replica group that holds the same, that
is one less than it has ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from mbridge_fsdp_ckpt.families.declaration import Claim
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.format.sums import sums_bytes
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import ModelParameter, model_parameters
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.records import part_of, records_of
from mbridge_fsdp_ckpt.plan.slices import Component, plan_parameter
from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Subject
from mbridge_fsdp_ckpt.tools.estimate.records import record_bytes, records_in
from mbridge_fsdp_ckpt.tools.estimate.world import as_expert_rank, as_rank

_Boxes = dict[Component, set[Box]]
_Place = tuple[str, Component, Box, torch.dtype]


def read_over_held(saved: Estimate, loading: Estimate) -> float:
    """Bytes of records that the planned ranks of a loading job read, over those of what they hold.

    Args:
        saved: The job that saved.
        loading: A job of the same model in another layout.
    """
    shards = [item for plan in loading.plans.values() for item in plan.shards if not item.is_scalar]
    wanted = {item.plan.layout.key for item in shards}
    written: dict[str, _Boxes] = {}
    for key, parameter, subject in _parameters(saved, wanted):
        written[key] = _written(parameter, subject)
    met: dict[_Place, int] = {}
    read = sum(_read_bytes(item, written, met) for item in shards)
    return read / sum(records_in(item.box.size, dtype_from_name(item.entry.dtype)).bytes for item in shards)


def _parameters(saved: Estimate, wanted: set[str]) -> Iterator[tuple[str, ModelParameter, Subject]]:
    """The parameters of these names on disk, as ranks with coordinates of zero hold them."""
    layout, left = saved.layout, set(wanted)
    for stage, subject in enumerate(saved.subjects):
        with as_rank(layout, stage * layout.stage_world):
            model = EstimatedModel(subject, stage * layout.stage_world)
            for expert in range(layout.expert):
                with as_expert_rank(expert):
                    found = {parameter.layout.key: parameter for parameter in model_parameters(model)}
                yield from ((key, found[key], subject) for key in left & found.keys())
                left -= found.keys()
                if not left:
                    return


def _written(parameter: ModelParameter, subject: Subject) -> _Boxes:
    layout, context = parameter.layout, parameter.context
    item = None if context is None else subject.sharding.item(parameter.tensor.orig_param)  # type: ignore[attr-defined]
    whole = [(0, layout.flat)] if item is None else item.parts()
    claim = default_registry().claim(context) if context is not None else None
    found: _Boxes = {}
    for _, flat in whole:
        for component, box in _blocks(layout, claim, flat):
            found.setdefault(component, set()).add(box)
    return found


def _blocks(layout: ParameterLayout, claim: Claim | None, flat: FlatRange) -> Iterator[tuple[Component, Box]]:
    """What tensor-parallel ranks have of one data-parallel rank's part."""
    count = layout.tensor_parallel.count if layout.tensor_parallel_dim is not None else 1
    for index in range(count):
        cut = replace(layout, flat=flat, tensor_parallel=Axis(index, layout.tensor_parallel.count))
        for slice_ in plan_parameter(cut, claim).slices:
            yield slice_.component, slice_.box


def _read_bytes(item: LocalShard, written: dict[str, _Boxes], met: dict[_Place, int]) -> int:
    key, component, dtype = item.plan.layout.key, item.slice_.component, dtype_from_name(item.entry.dtype)
    place = key, component, item.box, dtype
    if place not in met:
        boxes = (box for box in written[key].get(component, ()) if box.intersect(item.box) is not None)
        records = (record for box in boxes for record in records_of(box, dtype.itemsize))
        touched = (each for each in records if each.intersect(item.box) is not None)
        met[place] = sum(_bytes_of(each, dtype, item.box) for each in touched)
    return met[place]


def _bytes_of(record: Box, dtype: torch.dtype, wanted: Box) -> int:
    """What is read of a record for a block that has some of it."""
    part = part_of(record, dtype.itemsize, [wanted])
    if part is None:
        return record_bytes(record.size, dtype)
    return part.end - part.begin + sums_bytes(record.volume * dtype.itemsize)

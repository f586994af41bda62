# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""All ranks of a job, counted from the parameters of one rank a pipeline stage.

Ranks of a stage have the same parameters, cut at other places.  Where they are cut, and who of those that hold the
same block writes it, is arithmetic on coordinates: that of `shards`, and of `holders` or `plan.slices.owner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.mesh import replicated_along
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import ModelParameter, model_parameters
from mbridge_fsdp_ckpt.plan.slices import owner
from mbridge_fsdp_ckpt.tools.estimate.cuts import Counts, Cutter
from mbridge_fsdp_ckpt.tools.estimate.holders import Held, Work, groups, shared_out
from mbridge_fsdp_ckpt.tools.estimate.layout import DENSE, Ranks
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Subject
from mbridge_fsdp_ckpt.tools.estimate.rank import RankWork
from mbridge_fsdp_ckpt.tools.estimate.shards import Item
from mbridge_fsdp_ckpt.tools.estimate.world import as_expert_rank

_PARTS = {
    ".experts.": "experts",
    "embedding": "vocabulary",
    "output_layer": "vocabulary",
    "self_attention": "attention and mixers",
    ".mixer.": "attention and mixers",
    ".mlp.": "MLPs and routers",
}
OTHERS = "norms and others"


@dataclass(slots=True)
class Tally:
    """What each rank has to do, by rank; the fields of `RankWork`.

    Args:
        world: Ranks.
        by_part: Bytes that a rank writes, by the part of the model that they belong to.
    """

    world: int
    bytes: Counts = field(init=False)
    chunks: Counts = field(init=False)
    blocks: Counts = field(init=False)
    numbers: Counts = field(init=False)
    keys: Counts = field(init=False)
    held_bytes: Counts = field(init=False)
    held_blocks: Counts = field(init=False)
    by_part: dict[str, Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in RankWork.__dataclass_fields__:
            setattr(self, name, np.zeros(self.world, dtype=np.int64))

    def work(self, rank: int) -> RankWork:
        """One rank's."""
        return RankWork(**{name: int(getattr(self, name)[rank]) for name in RankWork.__dataclass_fields__})


def count_stage(subject: Subject, stage: int, tally: Tally) -> None:
    """Count all that the ranks of a pipeline stage hold; this process passes for its first one (`world.as_rank`).

    Raises:
        LayoutError, FamilyError: As a save does.
    """
    _Counter(subject, stage, tally).count()


class _Counter:
    def __init__(self, subject: Subject, stage: int, tally: Tally) -> None:
        self._subject, self._tally = subject, tally
        self._model = EstimatedModel(subject, stage * subject.layout.stage_world)
        self._parameters = model_parameters(self._model)
        self._meshes = [subject.layout.mesh(expert=expert, stage=stage) for expert in (False, True)]
        self._cutter = Cutter()
        specs = subject.slots.values()
        self._slots = tuple(spec.dtype for spec in specs if spec.kind == "sharded")
        self._numbers = len(specs) - len(self._slots)
        self._names: dict[int, list[str]] = {}

    def count(self) -> None:
        """Count all that the ranks hold."""
        shared: dict[tuple[bool, tuple[str, ...], bool], list[Held]] = {}
        for number, parameter in enumerate(self._parameters):
            if parameter.context is None:
                self._count_buffer(number, parameter)
                continue
            expert, along = is_expert_name(parameter.context.name), self._along(parameter, parameter.context)
            for held in self._held(parameter):
                if parameter.layout.is_copy:
                    self._add_copy(groups(self._meshes[expert], along, shards_outer=self._shards_outer), held)
                else:
                    shared.setdefault((expert, along, held.cuts.is_replicated), []).append(held)
        for (expert, along, is_replicated), helds in shared.items():
            everywhere = (*along, "tensor") if is_replicated else along
            ranks = groups(self._meshes[expert], everywhere, shards_outer=self._shards_outer)
            for work in shared_out(ranks, helds):
                self._add(work)

    @property
    def _shards_outer(self) -> bool:
        return self._subject.layout.shards_outer

    def _along(self, parameter: ModelParameter, context: ParameterContext) -> tuple[str, ...]:
        """The dimensions along which ranks hold the same of a parameter."""
        is_cut, is_whole = parameter.layout.tensor_parallel_dim is not None, self._item(parameter) is None
        along = replicated_along(self._model.get_distributed_index(), context, is_cut=is_cut, is_whole=is_whole)
        return tuple(name for name in along if name != "expert" or self._subject.layout.expert > 1)

    def _item(self, parameter: ModelParameter) -> Item | None:
        """Its place in a bucket; None where every data-parallel rank has all of it: of buffers, too."""
        if parameter.context is None or not math.prod(parameter.layout.local_shape):
            return None
        original: Any = parameter.tensor
        return self._subject.sharding.item(original.orig_param)

    def _held(self, parameter: ModelParameter) -> Iterator[Held]:
        """By component."""
        layout, context = parameter.layout, parameter.context
        claim = default_registry().claim(context) if context is not None else None
        is_trained = parameter.tensor.requires_grad
        dtypes = (parameter.tensor.dtype, *(self._slots if is_trained else ()))
        numbers = self._numbers if is_trained else 0
        for cuts in self._cutter.cut(layout, claim, self._item(parameter), dtypes):
            yield Held(cuts, dtypes, numbers, parameter.bytes_per_element, _part(layout.key))

    def _count_buffer(self, number: int, parameter: ModelParameter) -> None:
        """A buffer is whole on every rank of its mesh."""
        mesh = self._meshes[is_expert_name(parameter.layout.key)]
        ranks = groups(mesh, DENSE, shards_outer=self._shards_outer)
        for held in self._held(parameter):
            for expert in range(ranks.shape[2]):
                key = held.cuts.component.name_of(self._name(number, expert))
                of_expert = ranks[:, :, expert : expert + 1]
                writer = owner(key, len(ranks))
                for blocks in held.cuts.blocks:
                    writers = of_expert[writer : writer + 1] if not parameter.layout.is_copy else of_expert[:0]
                    self._add(Work(held, of_expert, writers, blocks.bytes, blocks.records, blocks.origins))

    def _name(self, number: int, expert: int) -> str:
        """A buffer's key on one expert-parallel rank: experts are numbered over all of them."""
        if expert not in self._names:
            with as_expert_rank(expert):
                self._names[expert] = [parameter.layout.key for parameter in model_parameters(self._model)]
        return self._names[expert][number]

    def _add_copy(self, ranks: Ranks, held: Held) -> None:
        """Another stage writes it."""
        for blocks in held.cuts.blocks:
            own = ranks[:, blocks.ranks]
            self._add(Work(held, own, own[:0], blocks.bytes, blocks.records, blocks.origins))

    def _add(self, work: Work) -> None:
        tally, held = self._tally, work.held
        size, records, origins = (numbers[:, None, None] for numbers in (work.bytes, work.records, work.origins))
        tensors = len(held.dtypes)
        tally.held_bytes[work.holders] += size
        tally.held_blocks[work.holders] += tensors
        tally.bytes[work.writers] += size
        tally.by_part.setdefault(held.part, np.zeros(tally.world, dtype=np.int64))[work.writers] += size
        tally.chunks[work.writers] += records
        tally.blocks[work.writers] += tensors
        first = work.writers[..., :1]  # tensor-parallel ranks after the first have later rows, or columns
        tally.numbers[first] += origins * held.numbers
        tally.keys[first] += origins * (tensors + held.numbers)


def _part(key: str) -> str:
    return next((part for word, part in _PARTS.items() if word in key), OTHERS)

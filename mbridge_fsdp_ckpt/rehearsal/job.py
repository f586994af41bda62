"""All ranks of a job, counted from the parameters of one rank a pipeline stage.

Ranks of a stage have the same parameters, cut at other places.  Where they are cut, and who of those that hold the
same block writes it, is arithmetic on coordinates: that of `shards` and `plan.pieces.owner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.families.registry import default_registry
from mbridge_fsdp_ckpt.live.megatron_fsdp import ModelParameter, model_parameters
from mbridge_fsdp_ckpt.live.mesh import replicated_along
from mbridge_fsdp_ckpt.plan.pieces import owner
from mbridge_fsdp_ckpt.rehearsal.cuts import Counts, Cuts, Cutter
from mbridge_fsdp_ckpt.rehearsal.layout import DENSE, EXPERT, Ranks
from mbridge_fsdp_ckpt.rehearsal.model import RehearsedModel, Subject
from mbridge_fsdp_ckpt.rehearsal.rank import RankWork
from mbridge_fsdp_ckpt.rehearsal.world import as_expert_rank

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
    numbers: Counts = field(init=False)
    keys: Counts = field(init=False)
    held_bytes: Counts = field(init=False)
    held_chunks: Counts = field(init=False)
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
    counter = _Counter(subject, stage, tally)
    for number, parameter in enumerate(counter.parameters):
        counter.count(number, parameter)


class _Counter:
    def __init__(self, subject: Subject, stage: int, tally: Tally) -> None:
        self._subject, self._tally = subject, tally
        self._model = RehearsedModel(subject, stage * subject.layout.stage_world)
        self.parameters = model_parameters(self._model)
        self._meshes = [subject.layout.mesh(expert=expert, stage=stage) for expert in (False, True)]
        self._cutter = Cutter()
        specs = subject.slots.values()
        self._slots = tuple(spec.dtype for spec in specs if spec.kind == "sharded")
        self._numbers = len(specs) - len(self._slots)
        self._names: dict[int, list[str]] = {}

    def count(self, number: int, parameter: ModelParameter) -> None:
        layout, context = parameter.layout, parameter.context
        is_expert = is_expert_name(layout.key if context is None else context.name)
        mesh = self._meshes[is_expert]
        replicated: list[str] = list(DENSE)  # a buffer is whole on every rank of its mesh
        item = None
        if context is not None:
            original: Any = parameter.tensor
            item = self._subject.sharding.item(original.orig_param) if math.prod(layout.local_shape) else None
            is_cut = layout.tensor_parallel_dim is not None
            index = self._model.get_distributed_index()
            replicated = [*replicated_along(index, context, is_cut=is_cut, is_whole=item is None)]
        claim = default_registry().claim(context) if context is not None else None
        is_trained = parameter.tensor.requires_grad
        dtypes = (parameter.tensor.dtype, *(self._slots if is_trained else ()))
        for cuts in self._cutter.cut(layout, claim, item, dtypes):
            held = _Held(cuts, len(dtypes), self._numbers if is_trained else 0, _part(layout.key))
            self._add_held(mesh, held)
            along = [*replicated, "tensor"] if cuts.is_replicated else replicated
            if not layout.is_copy:
                for ranks in self._writers(mesh, along, held, number):
                    self._add_written(ranks, held)

    def _writers(self, mesh: Ranks, along: list[str], held: _Held, number: int) -> Iterator[Ranks]:
        """The ranks that write, in the mesh's dimensions; along those where all hold the same, it is one."""
        names = EXPERT if mesh.ndim == len(EXPERT) else DENSE
        axes = [names.index(dimension) for dimension in along]
        sizes = tuple(mesh.shape[axis] for axis in axes)
        if math.prod(sizes) == 1:
            yield mesh
            return
        experts = range(mesh.shape[names.index("expert")]) if "expert" in names and "expert" not in along else (None,)
        for expert in experts:
            key = held.cuts.component.name_of(self._name(number, expert or 0))
            place: list[slice] = [slice(None)] * mesh.ndim
            for axis, index in zip(axes, np.unravel_index(owner(key, math.prod(sizes)), sizes), strict=True):
                place[axis] = slice(int(index), int(index) + 1)
            if expert is not None:
                place[names.index("expert")] = slice(expert, expert + 1)
            yield mesh[tuple(place)]

    def _name(self, number: int, expert: int) -> str:
        """A parameter's key on one expert-parallel rank: experts are numbered over all of them."""
        if expert not in self._names:
            with as_expert_rank(expert):
                self._names[expert] = [parameter.layout.key for parameter in model_parameters(self._model)]
        return self._names[expert][number]

    def _add_held(self, mesh: Ranks, held: _Held) -> None:
        self._tally.held_bytes[mesh] += self._spread(held.cuts.bytes, mesh)
        self._tally.held_chunks[mesh] += self._spread(held.cuts.blocks * held.tensors, mesh)

    def _add_written(self, ranks: Ranks, held: _Held) -> None:
        tally, cuts = self._tally, held.cuts
        size = self._spread(cuts.bytes, ranks)
        tally.bytes[ranks] += size
        tally.by_part.setdefault(held.part, np.zeros(tally.world, dtype=np.int64))[ranks] += size
        tally.chunks[ranks] += self._spread(cuts.blocks * held.tensors, ranks)
        first = ranks[..., :1]  # tensor-parallel ranks after the first have later rows, or columns
        tally.numbers[first] += self._spread(cuts.origins * held.numbers, first)
        tally.keys[first] += self._spread(cuts.origins * (held.tensors + held.numbers), first)

    def _spread(self, counts: Counts, ranks: Ranks) -> Any:
        """Numbers of data-parallel ranks, in a shape that fits ranks in a mesh."""
        inside = (1,) * (ranks.ndim - 2)
        if len(counts) == 1:
            return int(counts[0])
        if self._subject.layout.shards_outer:
            return counts.reshape(-1, self._subject.layout.instances).T.reshape(ranks.shape[0], -1, *inside)
        return counts.reshape(1, -1, *inside)


@dataclass(frozen=True, slots=True)
class _Held:
    """A component's cuts, how many tensors and numbers there are of each, and the part of the model it belongs to."""

    cuts: Cuts
    tensors: int
    numbers: int
    part: str


def _part(key: str) -> str:
    return next((part for word, part in _PARTS.items() if word in key), OTHERS)

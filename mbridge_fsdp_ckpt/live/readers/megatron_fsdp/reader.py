# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""See `Reader`: a model under Megatron-FSDP v1, Megatron-Core's or that of the package `megatron-fsdp`.

While a model's structure stands, its tensors are found without a state dict: see `structure`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from mbridge_fsdp_ckpt.families.naming import Naming, is_expert_name
from mbridge_fsdp_ckpt.live.mesh import peers
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import layouts, parallel
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp.structure import (
    Place,
    found_at,
    parts_of,
    places_of,
    structure_of,
)
from mbridge_fsdp_ckpt.live.readers.protocol import Job, Look, ModelParameter, Ranks
from mbridge_fsdp_ckpt.plan.boxes import Shape
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.versions import require


class _Seen(NamedTuple):
    """A model as it was at the last look: see `Structure` and `places_of`."""

    parts: list[ref[Any]]
    marks: list[list[Any]]
    places: list[Place] | None


_seen: WeakKeyDictionary[object, _Seen] = WeakKeyDictionary()


class MegatronFsdpReader:
    """See `Reader`.

    Args:
        module: A `MegatronFSDP` module, or what is presented as one.
    """

    lists_groups = False

    def __init__(self, module: Any) -> None:
        require("Megatron-FSDP")
        self.module = module
        self.job = Job(parallel.coordinates(), {**parallel.topology(), "strategy": parallel.sharding_strategy(module)})
        self._peers: dict[tuple[tuple[Any, ...], bool, bool], Ranks] = {}

    @classmethod
    def find(cls, model: Any) -> MegatronFsdpReader | None:
        """The reader of a model that Megatron-FSDP v1 wraps; None of any other."""
        module = layouts.module_in(model)
        return None if module is None else cls(module)

    @cached_property
    def naming(self) -> Naming:
        """See `Reader`."""
        return layouts.naming_of(self.module)

    def look(self) -> Look:
        """See `Reader`."""
        seen = _seen.get(self.module)
        parts = [part() for part in seen.parts] if seen is not None else []
        structure = structure_of(self.module, parts) if parts and None not in parts else None
        stands = seen is not None and structure is not None and structure.marks == seen.marks
        if seen is not None and structure is not None and stands and seen.places is not None:
            return Look(found_at(seen.places, structure), structure.parts, seen.marks)
        tensors = list(layouts.tensors_of(self.module).values())
        if structure is None or not stands:
            structure = structure_of(self.module, parts_of(self.module))
            seen = _Seen(list(map(ref, structure.parts)), structure.marks, places_of(structure, tensors))
        if not structure.parameters:  # Megatron-FSDP keeps no lists that would tell of a change
            return Look(tensors, structure.parts, None)
        assert seen is not None
        _seen[self.module] = seen
        return Look(tensors, structure.parts, seen.marks)

    def layouts(self) -> list[ModelParameter]:
        """See `Reader`."""
        return layouts.model_parameters(self.module)

    def whole(self, key: str, shape: Shape) -> ParameterLayout:
        """See `Reader`."""
        return layouts.whole_layout(shape, key, self.module, self.naming.stages)

    def peers(self, plan: ParameterPlan) -> Ranks:
        """See `Reader`: asks the mesh once for each kind of parameter."""
        along, expert = plan.layout.copied_along, is_expert_name(plan.layout.key)
        # a tensor without elements is whole on every tensor-parallel rank, though its layout says that they cut it
        whole = any(slice_.replica.count > plan.layout.replica.count for slice_ in plan.slices)
        kind = along, expert, whole
        if kind not in self._peers:
            self._peers[kind] = tuple(peers(self.module, tuple(map(str, along)), expert=expert, whole=whole))
        return self._peers[kind]

    def refresh(self) -> None:
        """See `Reader`: main weights become compute weights, as after an optimizer step."""
        self.module.install_optimized_model_weights()
        self.module.synchronize_param_gather()
        self.module.start_param_sync()

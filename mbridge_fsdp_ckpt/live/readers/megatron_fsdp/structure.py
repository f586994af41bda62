# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the plans of a model's tensors are made from, as one list to compare, and where its tensors lie.

A state dict costs Megatron-FSDP a swap of all parameters for those that the optimizer updates, and the next forward
pass another one back: a tenth of a second for 3,000 of them.  While the structure stands, the same tensors are found
without it.  Nothing is kept alive: a module or parameter that died equals no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch

from mbridge_fsdp_ckpt.live.readers.megatron_fsdp.layouts import both_parameters

_NONE: Mapping[str, Any] = {}
_KINDS, _LEFT_OUT = ("_modules", "_parameters", "_buffers"), "_non_persistent_buffers_set"
_NAMED_BY = (
    "layer_number",
    "num_local_experts",
    "mtp_layer_pattern",
    "pre_process",
    "share_embeddings_and_output_weights",
    "vocab_start_index",
)
_OF_PARAMETERS = "megatron_fsdp_slice", "_tensor_parallel_mode", "tensor_model_parallel", "partition_dim"
_OF_ORIGINALS = "partition_stride", "partition_sizes"


class Structure(NamedTuple):
    """A model as it is.

    Args:
        parts: The module and all below it, each once; not in the order of their names.
        parameters: Those that the optimizer updates, by Megatron-FSDP's names; none where it keeps no such list.
        marks: What names, layouts and the choice of tensors depend on, a list an attribute; fit to compare with others
            for as long as all parts live.
    """

    parts: list[Any]
    parameters: Mapping[str, torch.Tensor]
    marks: list[list[Any]]


def parts_of(module: Any) -> list[Any]:
    """A module and all below it, each once; not in the order of their names."""
    if not isinstance(module, torch.nn.Module):  # presented as one
        return [part for _, part in module.named_modules()]
    parts, seen = [module], {id(module)}
    for part in parts:
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                parts.append(child)
    return parts


def structure_of(module: Any, parts: list[Any]) -> Structure:
    """Look at each module and each parameter: to make a thing for each would take several times as long.

    Args:
        module: A `MegatronFSDP` module, or what is presented as one.
        parts: `parts_of` it; or those of an earlier structure, which is the present one if its marks are the same.
    """
    updated, computing = both_parameters(module)
    named = {id(parameter): name for of in (computing, updated) for name, parameter in of.items()}
    return Structure(parts, updated, [*_marks_of_parts(list(map(vars, parts)), named), *_marks_of_parameters(updated)])


def _marks_of_parts(own: Sequence[Mapping[str, Any]], named: Mapping[int, str]) -> Iterator[list[Any]]:
    numbered = [number for number, of in enumerate(own) if not of.keys().isdisjoint(_NAMED_BY)]
    yield numbered
    yield from ([own[number].get(name) for number in numbered] for name in _NAMED_BY)
    children, parameters, buffers = ([of.get(kind) or _NONE for of in own] for kind in _KINDS)
    for held in (children, parameters, buffers):
        yield list(map(len, held))
        yield list(chain.from_iterable(filter(None, held)))
    yield list(map(id, chain.from_iterable(held.values() for held in children if held)))
    # of each parameter, one of two lies in its module; a stranger is neither
    yield [named.get(id(parameter), parameter is None) for held in parameters if held for parameter in held.values()]
    yield [None if buffer is None else buffer.shape for held in buffers if held for buffer in held.values()]
    yield [frozenset(of[_LEFT_OUT]) for of, held in zip(own, buffers, strict=True) if held]


def _marks_of_parameters(updated: Mapping[str, Any]) -> Iterator[list[Any]]:
    """What `layouts` reads of them; what one of them is for good, such as its shape, is not asked again."""
    own = list(map(vars, updated.values()))
    originals = [vars(of["orig_param"]) if "orig_param" in of else _NONE for of in own]
    yield list(updated)
    yield list(map(ref, updated.values()))
    yield [parameter.requires_grad for parameter in updated.values()]
    yield [getattr(parameter, "_local_tensor", parameter).numel() for parameter in updated.values()]
    yield [index if (index := of.get("megatron_fsdp_dist_index")) is None else ref(index) for of in own]
    yield from ([of.get(name) for of in own] for name in _OF_PARAMETERS)
    yield from ([of.get(name) for of in originals] for name in _OF_ORIGINALS)


class Place(NamedTuple):
    """Where a tensor of the state dict lies.

    Args:
        parameter: What Megatron-FSDP calls it; empty for a buffer.
        part: The number of the module that has the buffer.
        leaf: What that module calls it.
    """

    parameter: str
    part: int = 0
    leaf: str = ""


def places_of(structure: Structure, tensors: Iterable[torch.Tensor]) -> list[Place] | None:
    """The places of tensors from a state dict; None if a tensor has no known place, or more than one."""
    named = {id(parameter): name for name, parameter in structure.parameters.items()}
    lie: dict[int, list[Place]] = {}
    for number, part in enumerate(structure.parts):
        for leaf, buffer in vars(part).get("_buffers", _NONE).items():
            lie.setdefault(id(buffer), []).append(Place("", number, leaf))
    found = [[Place(named[id(tensor)])] if id(tensor) in named else lie.get(id(tensor), []) for tensor in tensors]
    return [place for (place,) in found] if all(len(at) == 1 for at in found) else None


def found_at(places: Iterable[Place], structure: Structure) -> list[torch.Tensor]:
    """The tensors that lie at these places now, in a structure with the same marks as when they were found."""
    parts, parameters = structure.parts, structure.parameters
    return [
        parameters[parameter] if parameter else vars(parts[part])["_buffers"][leaf] for parameter, part, leaf in places
    ]

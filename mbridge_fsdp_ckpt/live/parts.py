"""A model's modules, and where among them each tensor of its state dict lies.

To make a state dict costs Megatron-FSDP a swap of all parameters for those that the optimizer updates, and the next
forward pass another one back: tens of milliseconds for hundreds of experts.  Where modules are as they were, the same
tensors are found without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from mbridge_fsdp_ckpt.live.megatron_fsdp import both_parameters

_NONE: Mapping[str, Any] = {}
_KINDS, _LEFT_OUT = ("_modules", "_buffers", "_parameters"), "_non_persistent_buffers_set"
_NAMED_BY = (
    "layer_number",
    "num_local_experts",
    "mtp_layer_pattern",
    "pre_process",
    "share_embeddings_and_output_weights",
    "vocab_start_index",
)


class PartMarks(NamedTuple):
    """Modules as they were.

    Args:
        parts: Which ones.
        children: The places of what is below each, one after the other; -1 for nothing.
        attributes: How many each has: only where that changes can another one have become numbered.
        numbered: The places of those that have something of `_NAMED_BY`.
        columns: See `_columns`.
    """

    parts: list[ref[Any]]
    children: list[int]
    attributes: list[int]
    numbered: list[int]
    columns: list[list[Any]]


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


def marks_of_parts(parts: Iterable[Any]) -> PartMarks:
    """What names, and the choice of tensors, depend on, as values to compare.  Nothing is kept alive."""
    parts = list(parts)
    own = list(map(vars, parts))
    places, numbered = {id(part): place for place, part in enumerate(parts)}, _numbered(own)
    children = [places.get(id(child), -1) for child in _children(own)]
    return PartMarks(list(map(ref, parts)), children, list(map(len, own)), numbered, _columns(own, numbered))


def parts_as_marked(first: Any, marks: PartMarks) -> list[Any] | None:
    """The modules that marks were made of, if they and what is below each are as they were.

    Args:
        first: The first of them, with all others below it.
        marks: What `marks_of_parts` gave of them.
    """
    parts = [part() for part in marks.parts]
    if parts[0] is not first or any(part is None for part in parts):
        return None
    own = list(map(vars, parts))
    if list(map(len, own)) != marks.attributes and _numbered(own) != marks.numbered:
        return None
    if not all(map(is_, _children(own), map([*parts, None].__getitem__, marks.children))):
        return None
    return parts if _columns(own, marks.numbered) == marks.columns else None


def _children(own: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(below.values() for of in own if (below := of.get("_modules")))


def _numbered(own: Iterable[Mapping[str, Any]]) -> list[int]:
    return [number for number, of in enumerate(own) if not of.keys().isdisjoint(_NAMED_BY)]


def _columns(own: Sequence[Mapping[str, Any]], numbered: Iterable[int]) -> list[list[Any]]:
    """What is asked of each, a list an attribute: to make a thing for each part takes several times as long.

    Args:
        own: The attributes of each.
        numbered: See `PartMarks`.
    """
    columns = [[own[number].get(name) for number in numbered] for name in _NAMED_BY]
    below, within, parameters = ([of.get(kind, _NONE) for of in own] for kind in _KINDS)
    for held in (below, within, parameters):
        columns += [list(map(len, held)), list(chain.from_iterable(filter(None, held)))]
    for held in (within, parameters):  # a name may stand for nothing yet, or no more
        columns.append(list(map(is_, chain.from_iterable(of.values() for of in held if of), repeat(None))))
    columns.append([frozenset(of[_LEFT_OUT]) for of, buffers in zip(own, within, strict=True) if buffers])
    return columns


class BufferPlace(NamedTuple):
    """Where a buffer lies.

    Args:
        name: In the state dict.
        part: The module that has it.
        leaf: What that calls it.
        shape: Its shape; one of another is planned anew.
    """

    name: str
    part: ref[Any]
    leaf: str
    shape: torch.Size

    def find(self) -> torch.Tensor | None:
        """What lies there now, if it is like the one that did."""
        part = self.part()
        tensor = vars(part).get("_buffers", _NONE).get(self.leaf) if part is not None else None
        return tensor if tensor is not None and tensor.shape == self.shape else None


class _Place(NamedTuple):
    """Where a tensor of the state dict lies.

    Args:
        name: Its name there.
        part: The number of the module that has it.
        leaf: What that module calls it.
        parameter: What Megatron-FSDP calls it; empty for a buffer.
    """

    name: str
    part: int
    leaf: str
    parameter: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of a state dict lie; some may lie nowhere that is known."""

    known: tuple[_Place, ...] | None

    @classmethod
    def of(cls, module: Any, parts: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> Places:
        """Where tensors lie that a state dict has just given.

        Args:
            module: A `MegatronFSDP` module.
            parts: See `parts_of`.
            tensors: By name, in the order of the state dict.
        """
        updated, _ = both_parameters(module)
        named = {id(parameter): name for name, parameter in updated.items()}
        lie: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for number, part in enumerate(parts):
            own = vars(part)
            for leaf, tensor in (*own.get("_buffers", {}).items(), *own.get("_parameters", {}).items()):
                lie[id(tensor)].append((number, leaf))
        places = []
        for name, tensor in tensors.items():
            parameter = named.get(id(tensor), "")
            if not lie[id(tensor)] or (isinstance(tensor, torch.nn.Parameter) and not parameter):
                return cls(None)
            at = lie[id(tensor)]
            places.append(_Place(name, *(at.pop(0) if len(at) > 1 else at[0]), parameter))
        return cls(tuple(places))

    def buffers(self, parts: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> list[BufferPlace]:
        """Those of buffers, in their order.

        Args:
            parts: As in `of`.
            tensors: As in `of`.
        """
        return [
            BufferPlace(place.name, ref(parts[place.part]), place.leaf, tensors[place.name].shape)
            for place in self.known or ()
            if not place.parameter
        ]

    def find(
        self, module: Any, parts: Sequence[Any], buffers: Mapping[str, torch.Tensor] = _NONE
    ) -> dict[str, torch.Tensor] | None:
        """What lies there now, parameters as the optimizer updates them; None where a state dict is to tell.

        Of any thread: each place is looked at once, and Megatron-FSDP's swap leaves none empty.

        Args:
            module: As in `of`.
            parts: Modules that are as they were.
            buffers: By name, those in whose place others may lie by now.
        """
        if self.known is None:
            return None
        updated, computing = both_parameters(module)
        found: dict[str, torch.Tensor] = {}
        for name, part, leaf, parameter in self.known:
            own = vars(parts[part])
            if not parameter:
                tensor = buffers[name] if name in buffers else own["_buffers"][leaf]
            else:
                tensor, live = updated.get(parameter), own["_parameters"][leaf]
                if live is not tensor and live is not computing.get(parameter):
                    return None
            if tensor is None:
                return None
            found[name] = tensor
        return found

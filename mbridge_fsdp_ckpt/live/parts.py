"""A model's modules, and where among them each tensor of its state dict lies.

To make a state dict costs Megatron-FSDP a swap of all parameters for those that the optimizer updates, and the next
forward pass another one back: tens of milliseconds for hundreds of experts.  Where modules are as they were, the same
tensors are found without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, NamedTuple
from weakref import ref

import torch

from mbridge_fsdp_ckpt.live.megatron_fsdp import both_parameters

type PartMarks = list[tuple[Any, ...]]

_NONE: Mapping[str, Any] = {}


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
    return list(map(_mark, parts))


def parts_as_marked(first: Any, marks: PartMarks) -> list[Any] | None:
    """The modules that marks were made of, if they and what is below each are as they were.

    Args:
        first: The first of them, with all others below it.
        marks: What `marks_of_parts` gave of them.
    """
    parts = [mark[0]() for mark in marks]
    if parts[0] is not first or any(part is None for part in parts):
        return None
    return parts if all(map(eq, map(_mark, parts), marks)) else None


def _mark(part: Any) -> tuple[Any, ...]:
    own = vars(part)
    below, within, get = own.get("_modules", _NONE), own.get("_buffers", _NONE), own.get
    return (
        ref(part),
        (*below, *map(id, below.values())) if below else (),
        tuple(get("_parameters", _NONE)),
        (*within, *sorted(own["_non_persistent_buffers_set"])) if within else (),
        get("layer_number"),
        get("num_local_experts"),
        get("mtp_layer_pattern"),
        get("pre_process"),
        get("share_embeddings_and_output_weights"),
        get("vocab_start_index"),
    )


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

    def find(self, module: Any, parts: Sequence[Any]) -> dict[str, torch.Tensor] | None:
        """What lies there now, parameters as the optimizer updates them; None where a state dict is to tell.

        Args:
            module: As in `of`.
            parts: Modules that are as they were.
        """
        if self.known is None:
            return None
        updated, computing = both_parameters(module)
        found: dict[str, torch.Tensor] = {}
        for name, part, leaf, parameter in self.known:
            own = vars(parts[part])
            if not parameter:
                tensor = own["_buffers"][leaf]
            else:
                tensor, live = updated.get(parameter), own["_parameters"][leaf]
                if live is not tensor and live is not computing.get(parameter):
                    return None
            if tensor is None:
                return None
            found[name] = tensor
        return found

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Memory that several keys of a checkpoint fill: tied weights, buffers that are views of one tensor.

A model saves such memory once for each name, with equal bytes, and gets it back whichever key is read last.  Another
model may have saved the same keys with different values: all but the last would be lost without an error.  So
where destinations overlap, they are filled in separate memory first, laid out alike:

    live     one [ . . . . . . . . ]             shadow   [ a a a a a a b b b b ]     b was written last
           other           [ . . . . . . ]                          ^ ^               is this still `one`'s a?

Where every key then finds there what it wrote, the order does not matter.  Few models have such memory, and it is
small: what is read here is read again when live memory is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.errors import KeyMismatchError
from mbridge_fsdp_ckpt.loading.destinations import Destination
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.remedies import remedy


@dataclass(frozen=True, slots=True)
class Filled:
    """Memory that a key fills.

    Args:
        key: The key.
        destination: The block that is wanted of it, and the memory.
        begin: The memory's first address.
        end: One past its last one.
    """

    key: str
    destination: Destination
    begin: int
    end: int

    @classmethod
    def of(cls, key: str, destination: Destination) -> Filled:
        """The range of addresses of a destination."""
        memory = destination.memory
        reach = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        begin = memory.data_ptr()
        return cls(key, destination, begin, begin + (reach + 1) * memory.itemsize)


def refuse_conflicts(targets: Mapping[str, Iterable[Destination]], opened: Opened, coordination: Coordination) -> None:
    """Refuse keys whose values differ for the same memory.  No live tensor is changed.

    Args:
        targets: The destinations of each key, in live memory.
        opened: The checkpoint.
        coordination: The coordination of the load.

    Raises:
        KeyMismatchError: One key would overwrite the values of another with different ones.
        CheckpointError, OSError: Bytes are damaged, or cannot be read.
    """
    for together in overlapping(targets):
        begin = min(filled.begin for filled in together)
        shadow = torch.zeros(max(filled.end for filled in together) - begin, dtype=torch.uint8)
        wrote = []
        for filled in together:
            elements, covered = _read(filled, opened, coordination)
            place = _place_in(shadow, filled, begin)
            place.copy_(torch.where(covered, elements, place))
            wrote.append((filled.key, elements, covered, place))
        lost = [key for key, elements, covered, place in wrote if bool(((elements != place) & covered).any())]
        if lost:
            raise _conflict(lost[0], [filled.key for filled in together])


def overlapping(targets: Mapping[str, Iterable[Destination]]) -> Iterator[Sequence[Filled]]:
    """Groups of destinations of several keys whose ranges of addresses overlap."""
    each = (Filled.of(key, place) for key, places in targets.items() for place in places if place.memory.numel())
    ordered = sorted(each, key=lambda filled: (str(filled.destination.memory.device), filled.begin))
    device, end, together = None, 0, list[Filled]()
    for filled in ordered:
        if filled.destination.memory.device != device or filled.begin >= end:
            if len({one.key for one in together}) > 1:
                yield together
            device, end, together = filled.destination.memory.device, 0, []
        together.append(filled)
        end = max(end, filled.end)
    if len({one.key for one in together}) > 1:
        yield together


def _read(filled: Filled, opened: Opened, coordination: Coordination) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that the checkpoint has of each element of a destination, and a mask of the elements that it has."""
    memory, box = filled.destination.memory, filled.destination.box
    own = Destination(box, torch.zeros(memory.shape, dtype=memory.dtype))
    covered = Destination(box, torch.zeros(memory.shape, dtype=torch.bool))
    for chunk in opened.chunks[filled.key]:
        if chunk.box.intersect(box) is not None:
            data = opened.source.read(chunk, verify=opened.verified)
            own.take(chunk.box, data)
            covered.take(chunk.box, torch.ones(data.shape, dtype=torch.bool))
            coordination.heartbeat()
    elements = own.memory.reshape(-1).view(torch.uint8).reshape(*memory.shape, memory.itemsize)
    return elements, covered.memory.unsqueeze(-1)


def _place_in(shadow: torch.Tensor, filled: Filled, begin: int) -> torch.Tensor:
    """The bytes of each element of a destination, in memory that is laid out as the live one."""
    memory = filled.destination.memory
    strides = (*(stride * memory.itemsize for stride in memory.stride()), 1)
    return shadow.as_strided((*memory.shape, memory.itemsize), strides, filled.begin - begin)


def _conflict(lost: str, keys: Sequence[str]) -> KeyMismatchError:
    others = ", ".join(key for key in dict.fromkeys(keys) if key != lost)
    return KeyMismatchError(
        expected=f"one value for memory that several keys fill: {lost} and {others} are tied in this model",
        found="a checkpoint in which their values differ: the saved model did not tie them",
        remedy=remedy(
            "Build the model as it was saved, untied.",
            "Or choose with {include} which of the keys to load.",
            "Nothing was changed.",
        ),
        key=lost,
    )

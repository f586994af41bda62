# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tensors between the call of a save and their copy: whether they are those of the call, and unchanged.

torch counts what changes a tensor in place (`_version`), whoever does it: `add_` and its like, under `no_grad` too,
`load_state_dict`, collectives that write.  Views and detached tensors share the counter of their base.  A DTensor has
one of its own beside that of its local tensor, which an operation on the DTensor leaves as it is: both are asked.  The
local tensors of Megatron-FSDP's parameters are views of a flat buffer, and count what is changed of any of that.

It does not count what goes through `.data`, through memory that others know by its address (kernels of Transformer
Engine, NumPy), or what a captured graph replays.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from operator import attrgetter

import torch

from mbridge_fsdp_ckpt.errors import ChangedTensorError
from mbridge_fsdp_ckpt.remedies import remedy

_COUNT = attrgetter("_version")


class Watched:
    """Tensors as they are now: a list an attribute, for a call that is to be short.

    Args:
        tensors: Those that a save reads later.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._local = _local_of(self._tensors)
        self._counts, self._local_counts = _counts_of(self._tensors), _counts_of(self._local)

    @cached_property
    def _places(self) -> dict[int, int]:
        """By a tensor's `id`; of the thread that copies."""
        return {id(tensor): place for place, tensor in enumerate(self._tensors)}

    def check(self, tensor: torch.Tensor, key: str) -> None:
        """See that a tensor has not changed until now: what has been read of it is as it was.

        Args:
            tensor: The parameter, the buffer, or what an optimizer keeps; no view of it.
            key: What it is saved as.

        Raises:
            ChangedTensorError: It has, or is none of those that there were.
        """
        place, (local,) = self._places.get(id(tensor)), _local_of([tensor])
        found = "another one in its place"
        if place is not None and self._local[place] is local:
            (count,), (local_count,) = _counts_of([tensor]), _counts_of([local])
            times = max(count - self._counts[place], local_count - self._local_counts[place])
            if times == 0:
                return
            found = f"that it was changed in place {times} times, it or one that shares its memory"
        raise ChangedTensorError(
            expected="the tensor as it was at the call of the save, until it is copied",
            found=found,
            remedy=remedy(
                "Tensors may change in the step of an optimizer alone, until they are copied.",
                "Before they change otherwise, call {until_taken}.",
                "Nothing was committed; the next save is a new one.",
            ),
            key=key,
        )


def _local_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def _counts_of(tensors: list[torch.Tensor]) -> list[int]:
    """How often each was changed; of tensors made for inference torch counts nothing."""
    try:
        return list(map(_COUNT, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

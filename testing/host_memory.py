# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which tensors count as CUDA tensors when every tensor lives in host memory.

Code that offloads to the host tells its two kinds of tensors apart by `is_cuda`.  On a CPU rank a tensor
counts as a CUDA tensor unless the program put it into host memory on purpose.  The mark sits on the storage,
so views, `detach()` and `.data` agree with the tensor they share memory with, and a copy is marked or not on
its own account.

`tensor.device` stays a CPU device (kernels, gloo and DTensor look at it), so a device object read from a
tensor says nothing about the tensor's kind.  It is recognised by identity instead: `device` answers with one
of two equal objects, and `torch.zeros(n, device=other.device)` then means "where `other` is".
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch

_MARK: Final = "_mbridge_fsdp_ckpt_on_host"


class Place(Enum):
    """Where a tensor pretends to be."""

    CUDA = "cuda"
    HOST = "host"


# Equal to each other and to every other torch.device("cpu"), yet distinguishable by identity.
DEVICE_OF_CUDA_TENSORS: Final = torch.device("cpu")
DEVICE_OF_HOST_TENSORS: Final = torch.device("cpu")


def _storage(tensor: Any) -> Any | None:
    """The storage that holds the data of `tensor`: for a DTensor, that of its local tensor."""
    while (local := getattr(tensor, "_local_tensor", None)) is not None:
        tensor = local
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and other layouts without one storage
        return None


def place_of(tensor: torch.Tensor) -> Place:
    """Where `tensor` pretends to be."""
    return Place.HOST if getattr(_storage(tensor), _MARK, False) else Place.CUDA


def share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both tensors are backed by the same storage."""
    one, other = _storage(left), _storage(right)
    return one is not None and other is not None and bool(one._cdata == other._cdata)


def put(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Mark the memory of `tensor`, which nothing else may share yet, as being at `place`."""
    storage = _storage(tensor)
    if storage is not None:
        setattr(storage, _MARK, place is Place.HOST)
    return tensor


def requested(device: Any) -> Place | None:
    """The place that a device argument asks for; None where it asks for neither (None, "meta")."""
    if device is DEVICE_OF_CUDA_TENSORS:
        return Place.CUDA
    if isinstance(device, bool) or device is None:
        return None
    if isinstance(device, int):
        return Place.CUDA
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return {"cuda": Place.CUDA, "cpu": Place.HOST}.get(kind)


def runnable(device: Any) -> Any:
    """The device argument to hand to torch instead of `device`: CUDA devices become the CPU."""
    return device if requested(device) is None else torch.device("cpu")

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Element types, and what they are called on disk."""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = vars(torch).get(name)  # getattr would import torch's lazy modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch neither compares nor copies elements of every dtype that it stores.

    Args:
        tensor: Contiguous.

    Returns:
        Integers of the elements' size; of complex128, two int64 in a last dimension of its own.
    """
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.dtype.itemsize])

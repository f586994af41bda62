"""Element types, and what they are called on disk."""

from __future__ import annotations

import torch


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

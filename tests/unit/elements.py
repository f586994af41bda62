# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Elements of all dtypes, and their bytes."""

import torch

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float64,
]


def pattern(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements whose bytes all differ from their neighbours', NaNs and negative zeros among them."""
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    return torch.arange(count * dtype.itemsize).mul(37).add(128).to(torch.uint8).view(dtype)


def expected_bytes(tensor: torch.Tensor) -> bytes:
    row = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(row.view(torch.uint8).tolist())

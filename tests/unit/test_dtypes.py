# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Elements as the integers of their bits."""

from __future__ import annotations

import pytest
import torch

from mbridge_fsdp_ckpt.plan.dtypes import bits, dtype_from_name


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, -0.0], dtype=torch.bfloat16), [0x3F80, -0x8000]),
        (torch.tensor([float("nan")], dtype=torch.float32), [0x7FC00000]),
        (torch.tensor([True, False]), [1, 0]),
        (torch.tensor([0x81], dtype=torch.uint8).view(torch.float8_e4m3fn), [0x81]),
        (torch.tensor([2.0], dtype=torch.float64), [0x4000000000000000]),
        (torch.tensor([1 + 2j], dtype=torch.complex128), [[0x3FF0000000000000, 0x4000000000000000]]),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_bits_of_elements(tensor: torch.Tensor, expected: list[object]) -> None:
    assert bits(tensor).tolist() == expected


def test_bits_are_the_same_memory() -> None:
    tensor = torch.zeros(2, dtype=torch.complex128)
    bits(tensor)[1] = bits(torch.tensor(3 - 1j, dtype=torch.complex128))
    assert tensor.tolist() == [0, 3 - 1j]


@pytest.mark.parametrize("name", ["lazy", "Tensor", "_C", "float33"])
def test_a_name_of_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no torch dtype"):
        dtype_from_name(name)

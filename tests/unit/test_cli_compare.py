# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Comparing elements and values: literal tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.tools import compare
from mbridge_fsdp_ckpt.tools.compare import Container, Tolerance, flattened, same_value, unlike

NAN = math.nan


@pytest.mark.parametrize(
    ("left", "right", "unequal", "largest"),
    [
        ([1.0, NAN], [1.0, NAN], 0, 0.0),
        ([1.0, 2.0], [1.0, NAN], 1, NAN),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([math.inf, 1.0], [math.inf, 1.0], 0, 0.0),
        ([math.inf, 1.0], [-math.inf, 3.0], 2, math.inf),
        ([], [], 0, 0.0),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_elements_are_equal_bit_by_bit(
    left: list[float], right: list[float], unequal: int, largest: float, dtype: torch.dtype
) -> None:
    found = compare.compare(torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype), Tolerance())
    assert (found.elements, found.total) == (unequal, len(left))
    if dtype.is_complex and not math.isfinite(largest):
        return  # what the modulus of inf - nan is, is torch's business
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_compared_as_well(dtype: torch.dtype) -> None:
    left, right = torch.tensor([0.0, 1.0, 1.0]).to(dtype), torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    found = compare.compare(left, right, Tolerance())
    assert (found.elements, found.total, found.largest) == (1, 3, 1.0)


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(1.0, 1.0)])
def test_a_dtype_without_arithmetic_is_compared_by_its_bits(tolerance: Tolerance) -> None:
    left, right = (torch.tensor(raw, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for raw in ([1, 2], [1, 3]))
    found = compare.compare(left, right, tolerance)
    assert (found.elements, found.total) == (1, 2)
    assert math.isnan(found.largest)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"a": {"b": 1}, "c": [2, (3,)]}, {"v.a.b": 1, "v.c.0": 2, "v.c.1.0": 3}),
        ({"a": {}, "b": []}, {}),
        (5, {"v": 5}),
        ({"a.b": 1, 2: 3, "2": 4}, {"v.'a.b'": 1, "v.[2]": 3, "v.2": 4}),
    ],
)
def test_nested_state_has_dotted_names(value: Any, names: dict[str, Any]) -> None:
    assert {name: leaf for name, leaf in flattened(value, "v").items() if not isinstance(leaf, Container)} == names


@pytest.mark.parametrize(
    ("left", "right", "named"),
    [
        ([1, 2], (1, 2), ["v"]),
        ({0: 1}, [1], ["v", "v.0", "v.[0]"]),
        ({0: 1}, {"0": 1}, ["v.0", "v.[0]"]),
        ([], (), ["v"]),
        ({}, {"a": 1}, ["v.a"]),
        ({"x": []}, {}, ["v.x"]),
        ({"x": {"y": 1}}, {}, ["v.x.y"]),
        ({"a": {"b": 1}, "a.b": 5}, {"a": {"b": 5}, "a.b": 1}, ["v.'a.b'", "v.a.b"]),
        ({"a": {"b": 1}, "a.b": 5}, {"a": {"b": 1}, "a.b": 5}, []),
        ({"x": 0.0}, {"x": -0.0}, ["v.x"]),
    ],
)
def test_what_differs_in_kind_or_name_is_no_equal(left: Any, right: Any, named: list[str]) -> None:
    assert sorted(unlike(flattened(left, "v"), flattened(right, "v"))) == named
    assert sorted(unlike(flattened(right, "v"), flattened(left, "v"))) == named


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, 0.0, True),
        (0.0, -0.0, False),
        (NAN, NAN, True),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([NAN]).numpy(), torch.tensor([NAN]).numpy(), True),
        (torch.tensor([1.0]).numpy(), torch.tensor([2.0]).numpy(), False),
    ],
)
def test_leaves_are_the_same_by_type_and_bits(left: Any, right: Any, same: bool) -> None:
    assert same_value(left, right) is same

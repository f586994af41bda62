# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Values as typed JSON: what goes in comes out to the bit, and nothing else gets in."""

import json
import random
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from mbridge_fsdp_ckpt.errors import ManifestError, UnsupportedStateError
from mbridge_fsdp_ckpt.format.values import decode, decode_mapping, encode, encode_mapping
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name, dtype_name
from tests.unit.elements import expected_bytes

FLOAT8 = torch.tensor([0, 1, 127, 200], dtype=torch.uint8).view(torch.float8_e4m3fn)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, types included."""
    if type(one) is not type(other):
        return False
    match one:
        case float():
            return struct.pack("d", one) == struct.pack("d", other)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return all(map(same, one, other)) and all(map(same, one.values(), other.values()))
        case torch.Tensor():
            return (one.dtype, one.shape) == (other.dtype, other.shape) and expected_bytes(one) == expected_bytes(other)
        case np.ndarray():
            return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -7,
        2**63,
        -(10**40),
        0.0,
        -0.0,
        0.1,
        5e-324,
        1.7976931348623157e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        'é\0\n"\\/\U0001f600',
        b"",
        bytes(range(256)),
        [],
        (),
        {},
        [1, [2.0, None], (3, [4])],
        ((), [()], ([],)),
        {"a": {"b": [1, True]}, "": 2},
        {1: "a", "1": "b", (2, 3): None, None: 0.5, 2.5: 2},
        {True: 1, "True": 2},
        {"$tuple": [1, 2]},
        {"plain": {"$float": "inf", "$": 1}},
        {"$unknown": 1},
        {"betas": (0.9, 0.95), "lr": 1e-4, "params": [0, 1]},
        torch.bfloat16,
        [torch.float32, torch.float8_e4m3fn, torch.bool],
    ],
    ids=repr,
)
def test_a_value_comes_back_to_the_bit(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, -0.0, float("inf"), float("nan")]),
        torch.tensor([1.5, -0.0, float("inf"), 3e38], dtype=torch.bfloat16),
        torch.tensor([[1, 2], [3, 255]], dtype=torch.uint8),
        torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j, -3j]),
        FLOAT8,
        torch.tensor(7.25, dtype=torch.float64),
        torch.empty(0),
        torch.empty((3, 0, 2), dtype=torch.int32),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12)[3:7],
        torch.arange(12.0)[3::12],  # one element, and a stride of 12
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda t: f"{dtype_name(t.dtype)}-{tuple(t.shape)}",
)
def test_a_tensor_comes_back_to_the_bit(tensor: torch.Tensor) -> None:
    found = through_json({"t": [tensor]})["t"][0]
    assert same(found, tensor.detach())
    found.reshape(-1)[:1] = 0  # writable, and memory of its own


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, -0.0, np.nan]),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.arange(6, dtype=np.int16)[::-2],
        np.array([True, False]),
        np.array(3.5),
        np.empty((0, 2), np.float32),
        np.arange(4, dtype=">i4"),
        np.broadcast_to(np.float32(2), (2, 2)),
        np.frombuffer(b"abcd", np.uint8),  # read-only
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_an_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    found = through_json(array)
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.shape == array.shape
    assert found.tobytes() == np.array(array, dtype=found.dtype).tobytes()


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (np.float64(-0.0), -0.0),
        (np.float32(0.1), 0.10000000149011612),
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.bytes_(b"xy"), b"xy"),
        (OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
        (torch.Size([2, 3]), (2, 3)),
    ],
)
def test_relatives_of_plain_types_become_plain(scalar: Any, expected: Any) -> None:
    assert same(through_json(scalar), expected)


def test_the_order_of_keys_is_kept() -> None:
    assert list(through_json({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]
    assert list(through_json({2: 1, 1: 2})) == [2, 1]


def test_random_states_go_on_where_they_were() -> None:
    generator, legacy = random.Random(7), np.random.RandomState(7)
    generator.gauss(0, 1)  # leaves a second number in the state
    legacy.normal()
    states = through_json({"python": generator.getstate(), "numpy": legacy.get_state(), "torch": torch.get_rng_state()})
    assert same(states["python"], generator.getstate())
    resumed, legacy_resumed = random.Random(), np.random.RandomState()
    resumed.setstate(states["python"])
    legacy_resumed.set_state(states["numpy"])
    assert [resumed.gauss(0, 1) for _ in range(5)] == [generator.gauss(0, 1) for _ in range(5)]
    assert legacy_resumed.normal(size=5).tolist() == legacy.normal(size=5).tolist()
    assert torch.equal(states["torch"], torch.get_rng_state())


class Custom:
    """A type that only a pickle could hold."""


@pytest.mark.parametrize(
    ("value", "where", "found"),
    [
        ({"a": [1, {"b": Custom()}]}, "values.a.1.b", "Custom"),
        ([{1, 2}], "values.0", "set"),
        ({"a": (0, lambda: None)}, "values.a.1", "function"),
        ({3: Custom}, "values.3", "type"),
        (1j, "values", "complex"),
        ({"z": np.complex128(1)}, "values.z", "complex"),
        ({"z": np.longdouble(1)}, "values.z", "longdouble"),
        ({"z": np.array([Custom()])}, "values.z", "object"),
        ({"z": np.array(["text"])}, "values.z", "<U4"),
        ({"z": np.zeros(2, np.longdouble)}, "values.z", "longdouble"),
        ({"big": torch.zeros((1 << 20) + 1, dtype=torch.uint8)}, "values.big", "1048577 bytes"),
        ({"big": np.zeros((1 << 17) + 1)}, "values.big", "1048584 bytes"),
        ({"m": torch.empty(2, device="meta")}, "values.m", "meta"),
        ({"s": torch.eye(2).to_sparse()}, "values.s", "sparse"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_be_held_is_named_with_its_place(value: Any, where: str, found: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode(value, "values")
    assert caught.value.key == where
    assert found in caught.value.found.replace("longfloat", "longdouble").replace("float128", "longdouble")


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind is dict else {1: value} if kind is int else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict, int])
def test_nesting_is_bounded(kind: type) -> None:
    assert same(through_json(nested(64, kind)), nested(64, kind))
    for depth in (65, 5000):
        with pytest.raises(UnsupportedStateError, match="nested"):
            encode(nested(depth, kind))


@pytest.mark.parametrize(
    "data",
    [
        {"$pickle": "gASVAAAAAAAAAAA="},
        {"$tuple": [1], "more": 2},
        {"$tuple": [1], "$float": "inf"},
        {"$float": "many"},
        {"$float": [1]},
        {"$float": None},
        {"$bytes": "eHk"},
        {"$bytes": "e h k="},
        {"$bytes": "é"},
        {"$bytes": 5},
        {"$tuple": 5},
        {"$tuple": "ab"},
        {"$tuple": {"a": 1}},
        {"$dict": [["a"]]},
        {"$dict": [["a", 1, 2]]},
        {"$dict": ["ab"]},
        {"$dict": {"ab": 1}},
        {"$dict": [[[1], 2]]},
        {"$dict": 5},
        {"$dtype": "float33"},
        {"$dtype": "nn"},
        {"$dtype": "Tensor"},
        {"$dtype": 32},
        {"$tensor": None},
        {"$tensor": {"dtype": "uint8", "shape": [1]}},
        {"$tensor": {"dtype": "uint8", "shape": [2], "data": "AA=="}},
        {"$tensor": {"dtype": "int16", "shape": [1], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": [-1], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": [-1, -1], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": "1", "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": ["1"], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": [1.5], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": [True], "data": "AA=="}},
        {"$tensor": {"dtype": "uint8", "shape": [0, 10**30], "data": ""}},
        {"$tensor": {"dtype": "uint8", "shape": [0, 2**62, 2**62], "data": ""}},
        {"$tensor": {"dtype": "uint8", "shape": [1], "data": "not base64"}},
        {"$tensor": {"dtype": "nn", "shape": [1], "data": "AA=="}},
        {"$ndarray": {"dtype": "bfloat16", "shape": [1], "data": "AAA="}},
        {"outer": [{"$unknown": 1}]},
        nested(1000),
        nested(1000, dict),
    ],
    ids=lambda data: json.dumps(data)[:60],
)
def test_a_malformed_value_is_refused(data: Any) -> None:
    with pytest.raises(ManifestError):
        decode(data)


@pytest.mark.parametrize("value", [{}, {"lr": 0.1}, {"$lr": (1, 2)}, {"": None}])
def test_a_mapping_by_name_comes_back(value: dict[str, Any]) -> None:
    assert decode_mapping(json.loads(json.dumps(encode_mapping(value, "values")))) == value


@pytest.mark.parametrize(("name", "found"), [(1, "int 1"), (None, "NoneType None"), ((1,), "tuple (1,)")])
def test_a_name_that_would_not_be_read_again_is_refused(name: Any, found: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode_mapping({"lr": 0.1, name: 2}, "rank_values")
    assert (caught.value.expected, caught.value.found) == ("strings as names", found)
    assert caught.value.key == "rank_values"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "NoneType"),
        (0.1, "float"),
        ("lr", "str"),
        ([], "list"),
        ([("lr", 0.1)], "list"),
        ((), "tuple"),
        ((1, 2), "tuple"),
        (b"", "bytes"),
        (torch.ones(0, 2), "Tensor"),
        ({1: 2}, "int as a name"),
        ({"lr": 0.1, None: 2}, "NoneType as a name"),
    ],
)
def test_what_is_no_mapping_by_name_is_refused(value: Any, found: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_mapping(json.loads(json.dumps(encode(value))))
    assert (caught.value.expected, caught.value.found) == ("a mapping by names", found)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.bool, "bool"),
    ],
)
def test_names_of_dtypes(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name
    assert dtype_from_name(name) is dtype


@pytest.mark.parametrize("name", ["", "float33", "torch.float32", "nn", "load", "__class__", "_dynamo", "float32 "])
def test_other_names_are_no_dtypes(name: str) -> None:
    with pytest.raises(ValueError, match="no torch dtype"):
        dtype_from_name(name)

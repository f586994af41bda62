# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Non-tensor values as typed JSON, never as a pickle.

JSON's own types stand for themselves; the rest is an object with the single key "$<type>":

    (1, 2)          {"$tuple": [1, 2]}              float("inf")     {"$float": "inf"}
    {1: "a"}        {"$dict": [[1, "a"]]}           b"xy"            {"$bytes": "eHk="}
    torch.bfloat16  {"$dtype": "bfloat16"}          a tensor         {"$tensor": {"dtype", "shape", "data"}}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mbridge_fsdp_ckpt.errors import ManifestError, UnsupportedStateError
from mbridge_fsdp_ckpt.io.checksums import digest
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.io.host_bytes import host_bytes
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name, dtype_name

_MAX_DEPTH = 64
_MAX_INLINE_BYTES = 1 << 20  # a tensor inside a value: RNG states, counters
_AS_THEY_ARE = frozenset({type(None), bool, int, str})


def encode(value: Any, path: str = "") -> Json:
    """A value as JSON-able data.

    Args:
        value: Numbers, strings, bytes, tensors of up to 1 MiB, NumPy arrays, dtypes, and lists, tuples and
            mappings of these.
        path: Where it stands, for the error.

    Raises:
        UnsupportedStateError: Another type, nested deeper than 64, or a larger tensor.
    """
    return _encode(value, path, 0)


def encode_mapping(value: Mapping[str, Any], path: str) -> dict[str, Json]:
    """A mapping by names, for `decode_mapping`.

    Raises:
        UnsupportedStateError: A value that `encode` refuses, or a name that is no string.
    """
    for name in value:
        if not isinstance(name, str):
            raise _unsupported("strings as names", f"{type(name).__name__} {name!r}"[:200], path)
    return _encode_mapping(value, path, 0)


def hash_of(encoded: Json) -> int:
    """Checksum of encoded values: equal ones have the same, in whichever order their names come."""
    return digest(json.dumps(encoded, sort_keys=True, separators=(",", ":")).encode())


def _encode(value: Any, path: str, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        raise _unsupported("at most 64 nested containers", "more", path)
    match value:
        case None | bool() | str():
            return value
        case np.generic() if not isinstance(value.item(), np.generic):
            return _encode(value.item(), path, depth)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list():
            return _encode_items(value, path, depth)
        case tuple():
            return {"$tuple": _encode_items(value, path, depth)}
        case Mapping():
            return _encode_mapping(value, path, depth)
        case torch.Tensor():
            return {"$tensor": _encode_tensor(value, path)}
        case np.ndarray():
            return {"$ndarray": _encode_tensor(_as_tensor(value, path), path)}
        case torch.dtype():
            return {"$dtype": dtype_name(value)}
    raise _unsupported("a number, string, bytes, tensor, dtype, or a container of these", type(value).__name__, path)


def _encode_items(items: Sequence[Any], path: str, depth: int) -> list[Json]:
    """Each; training waits for the 600 numbers of a generator's state."""
    known = _known(depth)
    return [
        item if type(item) in known else _encode(item, f"{path}.{number}", depth + 1)
        for number, item in enumerate(items)
    ]


def _known(depth: int) -> frozenset[type]:
    """Types of items in a container that stand for themselves: there is no name to be made of where they stand."""
    return _AS_THEY_ARE if depth < _MAX_DEPTH else frozenset()


def _encode_mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Json]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        known = _known(depth)
        return {  # training waits for hyperparameters, most of which are floats
            key: item
            if type(item) in known or (known and type(item) is float and math.isfinite(item))
            else _encode(item, f"{path}.{key}", depth + 1)
            for key, item in value.items()
        }
    pairs: list[Json] = [
        [_encode(key, path, depth + 1), _encode(item, f"{path}.{key}", depth + 1)] for key, item in value.items()
    ]
    return {"$dict": pairs}


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """A copy: native byte order, writable, and (unlike `ascontiguousarray`) of the same shape."""
    if array.nbytes > _MAX_INLINE_BYTES:
        raise _unsupported("an array of up to 1 MiB", f"{array.nbytes} bytes", path)
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise _unsupported("an array of numbers", f"elements of {array.dtype}", path) from None


def _encode_tensor(tensor: torch.Tensor, path: str) -> Json:
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise _unsupported("a dense tensor", "a meta tensor" if tensor.is_meta else str(tensor.layout), path)
    if tensor.nbytes > _MAX_INLINE_BYTES:
        raise _unsupported("a tensor of up to 1 MiB", f"{tensor.nbytes} bytes", path)
    data = host_bytes(tensor).tobytes()
    shape: list[Json] = list(tensor.shape)
    return {"dtype": dtype_name(tensor.dtype), "shape": shape, "data": base64.b64encode(data).decode()}


def decode(data: Json) -> Any:
    """The value that `encode` described.

    Raises:
        ManifestError: Unknown type, contradictory sizes, nested too deeply, or more than fits into memory.
    """
    try:
        return _decode(data, 0)
    except MemoryError as error:
        raise _malformed("values that fit into memory", "more") from error


def decode_mapping(data: Json) -> dict[str, Any]:
    """The mapping by names that `encode` described.

    Raises:
        ManifestError: Data that `decode` refuses, or no mapping: a typed value is an object, too.
    """
    decoded = decode(data)
    if not isinstance(decoded, dict):
        raise _malformed("a mapping by names", type(decoded).__name__)
    for name in decoded:
        if not isinstance(name, str):
            raise _malformed("a mapping by names", f"{type(name).__name__} as a name")
    return decoded


def decode_mapping_or_null(data: Json) -> dict[str, Any]:
    """The same; empty for null, which stands where nothing was saved.

    Raises:
        ManifestError: Data that `decode` refuses, or no mapping.
    """
    return {} if data is None else decode_mapping(data)


def _decode(data: Json, depth: int) -> Any:
    if depth > _MAX_DEPTH * 3:
        raise _malformed("values nested at most 64 deep", "more")
    if isinstance(data, list):
        return [_decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    special = [key for key in data if key.startswith("$")]
    if not special:
        return {key: _decode(item, depth + 1) for key, item in data.items()}
    if len(data) != 1 or special[0] not in _DECODERS:
        raise _malformed(f"one of {', '.join(_DECODERS)} alone", ", ".join(sorted(data))[:200])
    try:
        return _DECODERS[special[0]](data[special[0]], depth + 1)
    except (ValueError, TypeError, KeyError, RuntimeError, ArithmeticError, binascii.Error) as error:
        raise _malformed(f"a well-formed {special[0]}", f"{type(error).__name__}: {error}"[:500]) from error


def _decode_tensor(data: Any, depth: int) -> torch.Tensor:
    dtype, shape = dtype_from_name(data["dtype"]), _list(data["shape"])
    raw = base64.b64decode(data["data"], validate=True)
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for {dtype} of shape {shape}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"a list is needed, not {type(data).__name__}")
    return data


def _decode_dict(data: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair) for pair in _list(data)]
    return {_decode(key, depth): _decode(item, depth) for key, item in pairs}


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$float": lambda data, depth: float(data),
    "$bytes": lambda data, depth: base64.b64decode(data, validate=True),
    "$tuple": lambda data, depth: tuple(_decode(item, depth) for item in _list(data)),
    "$dict": _decode_dict,
    "$tensor": _decode_tensor,
    "$ndarray": lambda data, depth: _decode_tensor(data, depth).numpy(),
    "$dtype": lambda data, depth: dtype_from_name(data),
}


def _unsupported(expected: str, found: str, path: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        expected=expected,
        found=found,
        remedy="The format holds data only: convert the value before saving, or leave it out.",
        key=path or None,
    )


def _malformed(expected: str, found: str) -> ManifestError:
    return ManifestError(expected=expected, found=found, remedy="The manifest is damaged: use another checkpoint.")

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Attacks in JSON by someone who can sign: texts that are more than they seem, and typed values that lie."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak import forge
from tests.soak.forge import MANIFEST, OWN
from tests.soak.hostile import VERIFIED

Build = Callable[[Path], None]
Made = Iterator[tuple[str, Build, str]]
"""Name, what makes a good checkpoint hostile, and why it may be accepted."""

DEPTHS = (70, 200, 900, 1_000, 3_000, 9_000, 30_000, 100_000)


def texts() -> Made:
    """JSON that is none, or that is more than it seems."""

    def manifest(text: str, **parsed: Any) -> Build:
        return partial(forge.sign_text, text=text, **parsed)

    yield "duplicate field", manifest('"values":1,"values":2', values=2), ""
    yield "a million keys, one twice", _million_keys, ""
    for literal in ("NaN", "Infinity", "-Infinity"):
        yield literal, manifest(f'"values":{{"x":{literal}}}', values={"x": float(literal)}), ""
    yield (
        "1e999",
        manifest('"values":{"x":1e999}', values={"x": float("inf")}),
        "an infinite value, which a value may be",
    )
    yield "an integer of a million digits", manifest('"values":' + "9" * 1_000_000, values=0), ""
    yield from _nested_texts()
    yield from _other_texts()
    yield "a gigabyte manifest", partial(_sparse, MANIFEST), ""
    yield "a manifest of 80 million lists", _many_lists, ""
    yield "a value of 100 MB", _long_value, "its size is bounded by the manifest's"
    yield "a key of 100 MB", _long_key, ""
    yield (
        "lone surrogates",
        forge.edit_manifest(partial(forge.put, path=("values",), value={"\ud800": "\udfff"})),
        "text that JSON can hold; it is never a file name",
    )


def _nested_texts() -> Made:
    for depth in DEPTHS:
        opening, closing = "[" * depth, "]" * depth
        for field in ("format", "version", "values", "keys", "unknown"):
            reason = {"unknown": "readers ignore unknown fields", "values": "lists, not too deep"}.get(field, "")
            reason = reason if depth < (200 if field == "values" else 3_000) else ""
            yield f"{field} nested {depth} deep", partial(raw_field, field, opening + closing), reason
        nested = (opening + closing).encode()
        header = partial(_with_field, "axes", nested)
        yield f"group: axes nested {depth} deep", forge.edit_header(header), ""
        reason = "readers ignore unknown fields" if depth < 3_000 else ""
        unknown = partial(_with_field, "unknown", nested)
        yield f"alone: a header nested {depth} deep", partial(_alone, forge.edit_header(unknown, OWN)), reason
        record = forge.edit_index(partial(forge.put, path=("record",), value=b'{"values":' + nested + b"}"), OWN)
        yield f"alone: a record nested {depth} deep", partial(_alone, record), "lists" if depth < 200 else VERIFIED


def _other_texts() -> Made:
    def raw(data: bytes, directory: Path) -> None:
        (directory / MANIFEST).write_bytes(data)

    for what, data in {
        "invalid UTF-8": b'{"format":"\xff\xfe"}',
        "a BOM": b"\xef\xbb\xbf{}",
        "UTF-16": '{"format":"fsdp_dtensor_safe"}'.encode("utf-16"),
        "UTF-32": '{"format":"fsdp_dtensor_safe"}'.encode("utf-32"),
        "empty": b"",
        "only a number": b"5",
        "only null": b"null",
        "only a list": b"[]",
        "zeros": bytes(1000),
    }.items():
        yield f"manifest is {what}", partial(raw, data), ""
        yield f"group: the file is {what}", partial(forge.replace_index, data=data), ""
        yield f"own: the file is {what}", partial(forge.replace_index, data=data, name=OWN), ""
        yield f"group: a header is {what}", forge.edit_header(partial(_instead, data)), ""
        record = forge.edit_index(partial(forge.put, path=("record",), value=data), OWN)
        reason = "no values" if what == "empty" else VERIFIED
        yield f"alone: a record is {what}", partial(_alone, record), reason
    for what, text in {"a field twice": b'"rows":1', "NaN": b'"more":NaN', "digits": b'"more":' + b"9" * 10**6}.items():
        yield f"group: a header with {what}", forge.edit_header(partial(_with_text, text)), ""
        record = forge.edit_index(
            partial(forge.put, path=("record",), value=b'{"values":1,"values":1,' + text + b"}"), OWN
        )
        yield f"alone: a record with {what}", partial(_alone, record), VERIFIED


def _with_field(field: str, text: bytes, header: dict[str, Any]) -> bytes:
    """A header with a field's text."""
    rest = json.dumps({name: value for name, value in header.items() if name != field})
    return rest[:-1].encode() + b',"' + field.encode() + b'":' + text + b"}"


def _instead(data: bytes, header: dict[str, Any]) -> bytes:
    return data


def _with_text(text: bytes, header: dict[str, Any]) -> bytes:
    return json.dumps(header)[:-1].encode() + b"," + text + b"}"


def _alone(build: Build, directory: Path) -> None:
    forge.alone(directory)
    build(directory)


def _million_keys(directory: Path) -> None:
    pairs = ",".join(f'"{i}":0' for i in range(1_000_000))
    forge.sign_text(directory, f'"values":{{{pairs},"999999":0}}', values={})


def _many_lists(directory: Path) -> None:
    raw_field("values", "[" + "[]," * 80_000_000 + "0]", directory)


def _long_value(directory: Path) -> None:
    forge.edit_manifest(partial(forge.put, path=("values",), value={"x": "x" * 100_000_000}))(directory)


def _long_key(directory: Path) -> None:
    forge.edit_manifest(partial(forge.put, path=("keys",), value={"x" * 100_000_000: 5}))(directory)


def raw_field(field: str, text: str, directory: Path) -> None:
    """A field of the manifest as text, with the checksum right where Python can compute it."""
    body = forge.read_manifest(directory)
    try:
        parsed = json.loads(text) if len(text) < 1_000_000 else None
        forge.sign_text(directory, f'"{field}":{text}', **{field: parsed})
    except RecursionError:
        rest = ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in body.items() if k != field)
        (directory / MANIFEST).write_text(f'{{{rest},"{field}":{text}}}')


def _sparse(name: str, directory: Path) -> None:
    with (directory / name).open("r+b") as file:
        file.truncate(1 << 30)


def typed_values() -> Made:
    """Values whose types are lies."""
    tensor = {"dtype": "float32", "shape": [1], "data": base64.b64encode(bytes(4)).decode()}
    lies: dict[str, Any] = {
        "a tensor of 2**60 elements": {"$tensor": {**tensor, "shape": [1 << 60]}},
        "a tensor of overflowing shape": {"$tensor": {**tensor, "shape": [1 << 62, 1 << 62]}},
        "no elements of overflowing shape": {"$tensor": {**tensor, "shape": [0, 1 << 62, 1 << 62], "data": ""}},
        "no elements of 2**64 rows": {"$tensor": {**tensor, "shape": [0, 1 << 64], "data": ""}},
        "a negative shape": {"$tensor": {**tensor, "shape": [-1]}},
        "a shape of floats": {"$tensor": {**tensor, "shape": [1.0]}},
        "a tensor that is no base64": {"$tensor": {**tensor, "data": "*"}},
        "a tensor of 10 MB for one element": {"$tensor": {**tensor, "data": "A" * 10_000_000}},
        "a quantized tensor": {"$tensor": {**tensor, "dtype": "qint32"}},
        "a tensor of no dtype": {"$tensor": {**tensor, "dtype": "load"}},
        "an array of bfloat16": {"$ndarray": {**tensor, "dtype": "bfloat16", "shape": [2]}},
        "unhashable keys": {"$dict": [[[1], 2]]},
        "keys that are mappings": {"$dict": [[{}, 2]]},
        "pairs of three": {"$dict": [[1, 2, 3]]},
        "a mapping that is none": {"$dict": 5},
        "an unknown type": {"$code": "exit()"},
        "two types": {"$tuple": [], "$float": "nan"},
        "a float of 400 digits": {"$float": 10**400},
        "a float that is text": {"$float": "x"},
        "a float that is a list": {"$float": []},
        "bytes that are no text": {"$bytes": 5},
        "a dtype that is a list": {"$dtype": [1]},
        "a dtype that is a module": {"$dtype": "os"},
        "nested tuples": _nested(300),
    }
    for what, value in lies.items():
        reason = "as many bytes as recorded, and nothing that a load compares" if what == "a quantized tensor" else ""
        yield what, forge.edit_manifest(partial(forge.put, path=("values",), value={"x": value})), reason
        record = json.dumps({"values": value}).encode()
        own = forge.edit_index(partial(forge.put, path=("record",), value=record), OWN)
        yield f"{what}, of a rank", partial(_alone, own), reason or VERIFIED
        known = forge.edit_manifest(partial(_hyperparameters, {"lr": value}))
        yield f"{what}, of an optimizer", known, reason
    for what, value in {**lies, **NO_MAPPINGS}.items():
        yield f"{what}, as all values", forge.edit_manifest(partial(forge.put, path=("values",), value=value)), ""
        for field in ("values", "extra_state"):
            record = json.dumps({field: value}).encode()
            own = forge.edit_index(partial(forge.put, path=("record",), value=record), OWN)
            yield f"{what}, as all {field} of a rank", partial(_alone, own), VERIFIED
        yield f"{what}, as hyperparameters", forge.edit_manifest(partial(_hyperparameters, value)), ""


NO_MAPPINGS: dict[str, Any] = {
    "a tuple": {"$tuple": [1]},
    "a tuple of nothing": {"$tuple": []},
    "a tuple of pairs": {"$tuple": [["lr", 0.1]]},
    "infinity": {"$float": "inf"},
    "bytes": {"$bytes": ""},
    "a dtype": {"$dtype": "uint8"},
    "an array of pairs": {"$ndarray": {"dtype": "uint8", "shape": [1, 2], "data": "AAE="}},
    "names that are numbers": {"$dict": [[1, 2]]},
    "names that are nothing": {"$dict": [[None, 2]]},
}
"""Typed values, each of them right where any may stand, and none that has names."""


def _hyperparameters(value: Any, body: dict[str, Any]) -> None:
    body["hyperparameters"] = dict.fromkeys(body["hyperparameters"], value)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"$tuple": [value]}
    return value

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Index files taken apart and put together by the rules of docs/format.md, without the code under test.

A file is a dict of its header's fields and lists of its arrays' fields; `encode` counts, and computes checksums.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import xxhash

MAGIC = b"FSDPSAFE"
FORMATS = {
    "ranks": ("<QQQ", ("rank", "size", "checksum")),
    "keys": ("<QQQQII", ("hash", "first", "count", "text", "entry", "origins")),
    "names": ("<IIQQQ", ("kind", "rank", "hash", "value", "text")),
    "numbers": ("<II16s", ("rank", "bytes", "data")),
}
BLOCK = 64


def hashed(data: bytes) -> int:
    """XXH3, 64 bits."""
    return int(xxhash.xxh3_64_intdigest(data))


def row_format(dimensions: int) -> str:
    """Of a row: rank, lead, offset, length, checksum, start, extent."""
    return f"<IIQQQ{2 * dimensions}Q"


def decode(data: bytes) -> dict[str, Any]:
    """A file's header and arrays."""
    magic, header_bytes, directory_bytes, checksum = struct.unpack_from("<8sQQQ", data)
    assert magic == MAGIC
    assert hashed(data[32 : 32 + header_bytes + directory_bytes]) == checksum
    header = json.loads(data[32 : 32 + header_bytes])
    found, at = {"header": header}, 32 + header_bytes

    def take(form: str, count: int) -> list[tuple[Any, ...]]:
        nonlocal at
        size = struct.calcsize(form)
        rows = [struct.unpack_from(form, data, at + i * size) for i in range(count)]
        at += count * size
        return rows

    def named(name: str) -> list[dict[str, Any]]:
        form, fields = FORMATS[name]
        return [dict(zip(fields, row, strict=True)) for row in take(form, header[name])]

    found["ranks"] = named("ranks")
    found["coordinates"] = [list(row) for row in take(f"<{len(header['axes'])}q", header["ranks"])]
    for name in ("keys", "names", "numbers"):
        found[name] = named(name)
    found["checks"] = [row[0] for row in take("<Q", -(-header["rows"] // BLOCK))]
    found["texts"] = data[at : at + header["texts"]]
    at = 32 + header_bytes + directory_bytes
    dimensions, rows = header["dimensions"], []
    for row in take(row_format(dimensions), header["rows"]):
        box = {"start": list(row[5 : 5 + dimensions]), "extent": list(row[5 + dimensions :])}
        rows.append(dict(zip(("rank", "lead", "offset", "length", "checksum"), row, strict=False)) | box)
    found["rows"] = rows
    found["record"] = data[at:]
    return found


def encode(file: dict[str, Any], **forced: Any) -> bytes:
    """The file's bytes.

    Args:
        file: As `decode` gives it; counts and checksums are those of the arrays.
        forced: Fields of the header that say something else, whatever the arrays hold.
    """
    header, dimensions = dict(file["header"]), file["header"]["dimensions"]
    rows = [
        struct.pack(
            row_format(dimensions),
            *(row[field] for field in ("rank", "lead", "offset", "length", "checksum")),
            *row["start"],
            *row["extent"],
        )
        for row in file["rows"]
    ]
    blocks = [b"".join(rows[i : i + BLOCK]) for i in range(0, len(rows), BLOCK)]
    counts = {name: len(file[name]) for name in ("ranks", "keys", "names", "numbers", "rows", "texts", "record")}
    header |= counts | {"record_checksum": f"{hashed(file['record']):016x}"} | forced
    directory = _packed(file, "ranks")
    directory += b"".join(struct.pack(f"<{len(row)}q", *row) for row in file["coordinates"])
    directory += b"".join(_packed(file, name) for name in ("keys", "names", "numbers"))
    directory += b"".join(struct.pack("<Q", hashed(block)) for block in blocks)
    directory += file["texts"] + bytes(-len(file["texts"]) % 8)
    prefix = json.dumps(header, separators=(",", ":")).encode()
    prefix += b" " * (-len(prefix) % 8)
    preamble = struct.pack("<8sQQQ", MAGIC, len(prefix), len(directory), hashed(prefix + directory))
    return b"".join((preamble, prefix, directory, *blocks, file["record"]))


def with_header(data: bytes, header: bytes) -> bytes:
    """A file with another header, whatever it says, and the checksum that fits it."""
    _, length, directory, _ = struct.unpack_from("<8sQQQ", data)
    rest = data[32 + length :]
    checksum = hashed(header + rest[:directory])
    return struct.pack("<8sQQQ", MAGIC, len(header), directory, checksum) + header + rest


def header_of(data: bytes) -> dict[str, Any]:
    """A file's header."""
    _, length, _, _ = struct.unpack_from("<8sQQQ", data)
    found: dict[str, Any] = json.loads(data[32 : 32 + length])
    return found


def _packed(file: dict[str, Any], name: str) -> bytes:
    form, fields = FORMATS[name]
    return b"".join(struct.pack(form, *(row[field] for field in fields)) for row in file[name])


def own(
    rank: int,
    *,
    save: str,
    coordinates: dict[str, int],
    payload: tuple[int, int],
    entries: list[dict[str, Any]],
    keys: list[dict[str, Any]],
    names: list[tuple[int, str, int]],
    record: dict[str, Any],
    suffix: str = "",
) -> dict[str, Any]:
    """A rank's own index file.

    Args:
        rank: The rank.
        save: The save's token.
        coordinates: Its place.
        payload: Size and checksum of its payload file.
        entries: Descriptions of keys.
        keys: Each with `key`, `entry`, and `rows` (of fields of a row, boxes as lists) or `data`; a `copy` of a number.
        names: Kind, name, value.
        record: Its own values.
        suffix: Of names.
    """
    dimensions = max([len(row["start"]) for key in keys for row in key.get("rows", ())], default=1)
    dimensions = max(dimensions, 1)
    texts, rows, numbers, key_rows = b"", list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for key in sorted(keys, key=lambda key: hashed(key["key"].encode())):
        texts += key["key"].encode()
        held = sorted(key.get("rows", ()), key=lambda row: row["start"])
        origins = sum(not any(row["start"]) for row in held) if held else int("copy" not in key)
        first, count = (len(rows), len(held)) if held else (len(numbers), 1)
        known = {"hash": hashed(key["key"].encode()), "first": first, "count": count, "text": len(texts)}
        key_rows.append(known | {"entry": key["entry"], "origins": origins})
        for row in held:
            padding = [0] * (dimensions - len(row["start"]))
            rows.append(row | {"rank": 0, "start": row["start"] + padding, "extent": row["extent"] + padding})
        if "data" in key:
            numbers.append({"rank": 0, "bytes": len(key["data"]), "data": key["data"].ljust(16, b"\0")})
    said = []
    for kind, hash_, name, value in sorted((kind, hashed(name.encode()), name, value) for kind, name, value in names):
        texts += name.encode()
        said.append({"kind": kind, "rank": 0, "hash": hash_, "value": value, "text": len(texts)})
    return {
        "header": {
            "save": save,
            "suffix": suffix,
            "axes": list(coordinates),
            "entries": entries,
            "dimensions": dimensions,
        },
        "ranks": [{"rank": rank, "size": payload[0], "checksum": payload[1]}],
        "coordinates": [list(coordinates.values())],
        "keys": key_rows,
        "names": said,
        "numbers": numbers,
        "texts": texts,
        "rows": rows,
        "record": json.dumps(record).encode(),
    }

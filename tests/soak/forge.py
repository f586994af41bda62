# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An attacker who can sign: takes a checkpoint apart, and puts it together with every checksum right.

The checksums are computed here, by the rules of docs/format.md, not by the code under test.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tests.unit import handmade, index_bytes

MANIFEST = "manifest.json"
GROUP = handmade.GROUP
OWN = handmade.index(0)
PAYLOAD = handmade.payload(0)
PREAMBLE = struct.Struct("<8sQQQ")

Index = dict[str, Any]
"""An index file taken apart: see `index_bytes`."""


def checksum(data: bytes) -> str:
    """As docs/format.md has it."""
    return f"xxh3_64:{xxhash.xxh3_64(data).hexdigest()}"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest's JSON."""
    found: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
    return found


def sign(directory: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the checksum that fits it."""
    body = {name: value for name, value in body.items() if name != "checksum"}
    body["checksum"] = checksum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    (directory / MANIFEST).write_text(json.dumps(body))


def sign_text(directory: Path, text: str, **parsed: Any) -> None:
    """Write a manifest with a part whose text is given; `parsed` is what a reader makes of it, for the checksum."""
    body = read_manifest(directory)
    canonical = {name: value for name, value in body.items() if name != "checksum"} | parsed
    digest = checksum(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())
    fields = [json.dumps(name) + ":" + json.dumps(value) for name, value in canonical.items() if name not in parsed]
    (directory / MANIFEST).write_text("{" + ",".join([*fields, text, f'"checksum":"{digest}"']) + "}")


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the manifest's JSON, signed."""

    def attack(directory: Path) -> None:
        body = read_manifest(directory)
        change(body)
        sign(directory, body)

    return attack


def replace_index(directory: Path, data: bytes, name: str = GROUP) -> None:
    """Another index file, with the size and checksum in the manifest that fit it, where it is a group's."""
    (directory / name).write_bytes(data)
    sign_index(directory, name, checksum(data))


def sign_index(directory: Path, name: str, digest: str) -> None:
    """Write a manifest that has an index file as it is."""
    body = read_manifest(directory)
    for entry in body["index"]:
        if entry["name"] == name:
            entry.update(size=(directory / name).stat().st_size, checksum=digest)
    sign(directory, body)


def edit_index(change: Callable[[Index], Any], name: str = GROUP, **forced: Any) -> Callable[[Path], None]:
    """A change of an index file, signed; `forced` are fields of its header that say something else."""

    def attack(directory: Path) -> None:
        file = index_bytes.decode((directory / name).read_bytes())
        change(file)
        replace_index(directory, index_bytes.encode(file, **forced), name)

    return attack


def with_header(data: bytes, text: bytes) -> bytes:
    """An index file whose header is some text."""
    _, header, directory, _ = PREAMBLE.unpack_from(data)
    start = PREAMBLE.size
    text += b" " * (-len(text) % 8)
    head = text + data[start + header : start + header + directory]
    preamble = PREAMBLE.pack(index_bytes.MAGIC, len(text), directory, index_bytes.hashed(head))
    return preamble + head + data[start + header + directory :]


def edit_header(text: Callable[[dict[str, Any]], bytes], name: str = GROUP) -> Callable[[Path], None]:
    """An index file whose header's text is made of what it was, signed."""

    def attack(directory: Path) -> None:
        data = (directory / name).read_bytes()
        replace_index(directory, with_header(data, text(index_bytes.decode(data)["header"])), name)

    return attack


def place_of(file: Index, key: str) -> int:
    """The place of a key among an index file's keys."""
    hashed = index_bytes.hashed(key.encode())
    return next(place for place, entry in enumerate(file["keys"]) if entry["hash"] == hashed)


def rows_of(file: Index, key: str) -> list[dict[str, Any]]:
    """The rows of a key."""
    entry = file["keys"][place_of(file, key)]
    rows: list[dict[str, Any]] = file["rows"][entry["first"] : entry["first"] + entry["count"]]
    return rows


def describe(file: Index, key: str, **fields: Any) -> None:
    """The description of a key says something else."""
    file["header"]["entries"][file["keys"][place_of(file, key)]["entry"]].update(fields)


def add_rows(file: Index, key: str, rows: list[dict[str, Any]]) -> None:
    """More rows of a key, behind those that it has; all counts as they should be."""
    place = place_of(file, key)
    entry = file["keys"][place]
    end = entry["first"] + entry["count"]
    file["rows"][end:end] = rows
    entry["count"] += len(rows)
    entry["origins"] += sum(not any(row["start"]) for row in rows)
    for later in file["keys"][place + 1 :]:
        later["first"] += len(rows) if is_sharded(file, later) else 0


def drop_row(file: Index, key: str) -> None:
    """One row of a key less; all counts as they should be."""
    place = place_of(file, key)
    row = file["rows"].pop(file["keys"][place]["first"] + file["keys"][place]["count"] - 1)
    file["keys"][place]["count"] -= 1
    file["keys"][place]["origins"] -= not any(row["start"])
    for later in file["keys"][place + 1 :]:
        later["first"] -= is_sharded(file, later)


def is_sharded(file: Index, entry: dict[str, Any]) -> bool:
    """Whether a key has rows; else it has a number."""
    return bool(file["header"]["entries"][entry["entry"]]["kind"] == "sharded")


def alone(directory: Path) -> None:
    """The checkpoint as one rank would have written it, whose own index file is the group's."""
    file, own = (index_bytes.decode((directory / name).read_bytes()) for name in (GROUP, OWN))
    payload = b"".join((directory / handmade.payload(rank)).read_bytes() for rank in (0, 1))
    for row in file["rows"]:
        row["offset"] += row["rank"] and file["ranks"][0]["size"]
    for entry in (*file["rows"], *file["numbers"], *file["names"]):
        entry["rank"] = 0
    file["ranks"] = [{"rank": 0, "size": len(payload), "checksum": index_bytes.hashed(payload)}]
    file |= {"coordinates": own["coordinates"], "record": own["record"]}
    (directory / PAYLOAD).write_bytes(payload)
    (directory / OWN).write_bytes(index_bytes.encode(file))
    for name in (GROUP, handmade.index(1), handmade.payload(1)):
        (directory / name).unlink()
    body = read_manifest(directory)
    body["topology"] = {"world": 1, "tensor": 1}
    body["index"] = [{"name": OWN, "rank": 0, "size": 0, "checksum": ""}]
    sign(directory, body)
    sign_index(directory, OWN, checksum((directory / OWN).read_bytes()))


def put(body: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set what a path leads to."""
    for part in path[:-1]:
        body = body[part]
    body[path[-1]] = value

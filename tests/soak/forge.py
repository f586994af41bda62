"""An attacker who can sign: takes a checkpoint apart, and puts it together with every checksum right.

The checksums are computed here, by the rules of docs/format.md, not by the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tests.unit import handmade

MANIFEST = "manifest.json"
TABLE = handmade.table(0)
PAYLOAD = handmade.payload(0)
TABLE_ROW_PREFIX = json.dumps(handmade.WEIGHT).join(["[", ","])


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


def replace_table(directory: Path, data: bytes, number: int = 0) -> None:
    """Another table, with the size and checksum in the manifest that fit it."""
    body = read_manifest(directory)
    entry = body["tables"][number]
    (directory / entry["name"]).write_bytes(data)
    entry.update(size=len(data), checksum=checksum(data))
    sign(directory, body)


def edit_table(change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    """A change of the first table's lines: a header, then rows; signed."""

    def attack(directory: Path) -> None:
        lines = [json.loads(line) for line in (directory / TABLE).read_bytes().splitlines()]
        change(lines)
        replace_table(directory, "".join(json.dumps(line) + "\n" for line in lines).encode())

    return attack


def edit_row(field: int, value: Any) -> Callable[[Path], None]:
    """One field of the first row is another."""
    return edit_table(lambda lines: lines[1].__setitem__(field, value))


def put(body: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set what a path leads to."""
    for part in path[:-1]:
        body = body[part]
    body[path[-1]] = value

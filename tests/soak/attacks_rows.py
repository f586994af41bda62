"""Attacks on the rows of a chunk table by someone who can sign: numbers that are none, and elements in the table."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from tests.soak import forge
from tests.soak.attacks_json import Made
from tests.unit import handmade

NUMBERS: dict[str, Any] = {
    "negative": -1,
    "2**63-1": (1 << 63) - 1,
    "2**63": 1 << 63,
    "2**64": 1 << 64,
    "of 4000 digits": 10**4000,
    "1e308": 1e308,
    "whole float": 0.0,
    "true": True,
    "null": None,
    "text": "0",
    "list": [0],
    "object": {},
}


def numbers() -> Made:
    """Numbers of a row that are none, or lead outside the file."""
    fields = {"file": 1, "offset": 2, "length": 3, "record offset": 7, "record length": 8}
    for (field, index), (what, value) in itertools.product(fields.items(), NUMBERS.items()):
        yield f"{what} as {field}", forge.edit_row(index, value), ""
    for what, value in NUMBERS.items():
        for field, index in {"box offset": 4, "box size": 5}.items():
            yield f"{what} as {field}", forge.edit_row(index, value), ""
            yield f"{what} in {field}", forge.edit_row(index, [value, 3]), ""


def scalars() -> Made:
    """Elements that stand in a table, of other lengths and keys, and in files."""
    texts = [
        "",
        "0",
        "0000e0",
        "0000e04000",
        "0000E040",
        " 0000e040",
        "0000e040\n",
        "0x00e040",
        "é" * 8,
        "0" * 10_000_000,
    ]
    for element in (*texts, 7, 7.0, None, True, [7], {"$bytes": "AADgQA=="}):
        yield f"elements {str(element)[:20]!r}", forge.edit_table(partial(_as_step, [handmade.STEP, element])), ""
    for key in (handmade.WEIGHT, handmade.BIAS, "absent", "", 5, None, [handmade.STEP]):
        yield f"elements of {key}", forge.edit_table(partial(_as_step, [key, "0000e040"])), ""
    in_a_file = [handmade.STEP, 0, 0, 4, [], [], forge.checksum(b""), 0, 4]
    yield "in a file", forge.edit_table(partial(_as_step, in_a_file)), ""
    yield "twice", forge.edit_table(_one_more_step), ""
    for field, value in {"kind": "sharded", "dtype": "float64", "shape": [1]}.items():
        path = ("keys", handmade.STEP, field)
        yield f"{field} {value}", forge.edit_manifest(partial(forge.put, path=path, value=value)), ""


def _as_step(row: list[Any], lines: list[Any]) -> None:
    place = next(n for n, line in enumerate(lines[1:], 1) if line[0] == handmade.STEP)
    lines[place] = row


def _one_more_step(lines: list[Any]) -> None:
    lines.append(next(line for line in lines[1:] if line[0] == handmade.STEP))
    lines[0]["chunks"] += 1

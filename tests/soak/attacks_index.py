# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Attacks on index files by someone who can sign: every number of every array another, and arrays that contradict.

Each is done to three files: `own`, what rank 0 of two wrote, which its load in the same layout reads; `group`, the
index of both, which a load in another layout reads; and `alone`, the index file of one rank, which is both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak import forge
from tests.soak.attacks_json import Build, Made
from tests.soak.forge import GROUP, OWN, Index
from tests.soak.hostile import FOUND, LONG, SIGNED, VERIFIED
from tests.unit import handmade

TARGETS = {"own": OWN, "group": GROUP, "alone": OWN}
ARRAYS: dict[str, dict[str, int]] = {
    "ranks": dict.fromkeys(("rank", "size", "checksum"), 64),
    "keys": dict.fromkeys(("hash", "first", "count", "text"), 64) | dict.fromkeys(("entry", "origins"), 32),
    "names": dict.fromkeys(("kind", "rank"), 32) | dict.fromkeys(("hash", "value", "text"), 64),
    "numbers": dict.fromkeys(("rank", "bytes"), 32),
    "rows": dict.fromkeys(("rank", "lead"), 32) | dict.fromkeys(("offset", "length", "checksum"), 64),
}
"""Arrays, and how many bits each field has."""

VALUES: dict[str, Callable[[int, int], int]] = {
    "none": lambda now, bits: 0,
    "one more": lambda now, bits: now + 1,
    "one less": lambda now, bits: now - 1,
    "what wraps it to nothing": lambda now, bits: -now,
    "half of all": lambda now, bits: 1 << (bits - 1),
    "nearly half of all": lambda now, bits: (1 << (bits - 1)) - 1,
    "a quarter more": lambda now, bits: now + (1 << (bits - 2)),
    "the most": lambda now, bits: (1 << bits) - 1,
}

HARMLESS = {
    "ranks[0].checksum": VERIFIED,
    "ranks[-1].checksum": VERIFIED,
    "keys[0].hash": VERIFIED,
    "keys[-1].hash": VERIFIED,
    "keys[0].text": VERIFIED,
    "keys[-1].text": VERIFIED,
    "keys[0].origins": VERIFIED,
    "keys[-1].origins": VERIFIED,
    "names[0].kind": SIGNED,
    "names[-1].kind": SIGNED,
    "names[0].rank": VERIFIED,
    "names[-1].rank": VERIFIED,
    "names[0].hash": FOUND,
    "names[-1].hash": FOUND,
    "names[0].text": FOUND,
    "names[-1].text": FOUND,
    "names[-1].value": SIGNED,
    "own: names[0].value": VERIFIED,
    "own: names[-1].value": "",
    "numbers[0].rank": VERIFIED,
    "numbers[-1].rank": VERIFIED,
    "rows[0].lead": SIGNED,
    "rows[-1].lead": SIGNED,
    "coordinates": SIGNED,
    "a rank more": VERIFIED,
    "rows without boxes": VERIFIED,
    "all rows at the origin": VERIFIED,
    "one row twice": VERIFIED,
    "other texts": VERIFIED,
    "texts of zeros": VERIFIED,
    "no axes": SIGNED,
    "growing rows": VERIFIED,
    "growing empty_rows": VERIFIED,
    "alone: growing empty_rows": LONG,
    "growing names": VERIFIED,
    "growing long_key": VERIFIED,
    "growing ranks": VERIFIED,
    "growing entries": VERIFIED,
    "own: growing other_entries": LONG,
    "group: growing other_entries": VERIFIED,
    "alone: growing other_entries": LONG,
    "own: growing record": LONG,
    "alone: growing record": LONG,
    "own: growing long_record": LONG,
    "alone: growing long_record": LONG,
}
"""Why readers may accept it, by place and field, or by name; where the reason is not that of all files, by file."""

OF_SEVERAL_ROWS = {"all rows at the origin", "the rows of a key swapped"}
"""What changes nothing where each key has one row, which is at the origin: in what rank 0 wrote."""


def on(target: str, change: Callable[[Index], Any], **forced: Any) -> Build:
    """A change of one of the three files, signed."""
    return partial(to, target, forge.edit_index(change, TARGETS[target], **forced))


def to(target: str, build: Build, directory: Path) -> None:
    """An attack on one of the three files."""
    if target == "alone":
        forge.alone(directory)
    build(directory)


def everywhere(what: str, change: Callable[[Index], Any], harmless: str = "", field: str = "", **forced: Any) -> Made:
    """The same change in each of the three files, where it is one; `HARMLESS` may say why, of what or of the field."""
    for target in TARGETS:
        if target != "own" or what not in OF_SEVERAL_ROWS:
            of = field or what
            reason = HARMLESS.get(f"{target}: {of}", HARMLESS.get(of, harmless))
            yield f"{target}: {what}", partial(_to_another, target, on(target, change, **forced)), reason


def _to_another(target: str, build: Build, directory: Path) -> None:
    before = (directory / TARGETS[target]).read_bytes()
    build(directory)
    assert (directory / TARGETS[target]).read_bytes() != before, "no attack"


def numbers() -> Made:
    """Every number of every array as another, at the array's first and last place."""
    for array, fields in ARRAYS.items():
        for (field, bits), place, (what, value) in itertools.product(fields.items(), (0, -1), VALUES.items()):
            change = partial(_number, array, place, field, bits, value)
            number = f"{array}[{place}].{field}"
            yield from everywhere(f"{number} {what}", change, field=number)
    for box, place, dimension in itertools.product(("start", "extent"), (0, -1), (0, 1)):
        for what, value in VALUES.items():
            change = partial(_part_of_box, place, box, dimension, value)
            yield from everywhere(f"rows[{place}].{box}[{dimension}] {what}", change, VERIFIED)
    for axis, (what, value) in itertools.product(range(3), VALUES.items()):
        change = partial(_coordinate, axis, value)
        yield from everywhere(f"coordinates[0][{axis}] {what}", change, field="coordinates")


def _changed(now: int, bits: int, value: Callable[[int, int], int]) -> int:
    """Another number of so many bits; what would be the same is two more."""
    found = value(now, bits) % (1 << bits)
    return found if found != now else (now + 2) % (1 << bits)


def _number(array: str, place: int, field: str, bits: int, value: Callable[[int, int], int], file: Index) -> None:
    file[array][place][field] = _changed(file[array][place][field], bits, value)


def _part_of_box(place: int, box: str, dimension: int, value: Callable[[int, int], int], file: Index) -> None:
    numbers = file["rows"][place][box]
    numbers[dimension] = _changed(numbers[dimension], 64, value)


def _coordinate(axis: int, value: Callable[[int, int], int], file: Index) -> None:
    found = _changed(file["coordinates"][0][axis] % (1 << 64), 64, value)
    file["coordinates"][0][axis] = found - (1 << 64) if found >= 1 << 63 else found


def counts() -> Made:
    """A header whose counts are not those of its arrays, huge ones among them; and a preamble that lies."""
    lies = (0, 1, 3, 1_000, 1 << 31, 1 << 40, 1 << 58, 1 << 60, (1 << 63) - 1)
    for name in ("ranks", "keys", "names", "numbers", "rows", "texts", "record"):
        for count in lies:
            for target in TARGETS:
                if count != TRUE[target].get(name):
                    lie = on(target, lambda file: None, **{name: count})
                    yield f"{target}: {count} {name}", partial(_to_another, target, lie), ""
    for dimensions in (1, 3, 64, 65, 1 << 40):
        yield from everywhere(f"{dimensions} dimensions", lambda file: None, dimensions=dimensions)
    for target in TARGETS:
        for field, (what, value) in itertools.product(range(4), VALUES.items()):
            preamble = partial(_preamble, TARGETS[target], field, value)
            yield f"{target}: preamble[{field}] {what}", partial(to, target, preamble), ""
        for what, size in {"empty": 0, "a byte": 1, "31 bytes": 31, "a preamble alone": 32, "half": -1}.items():
            yield f"{target}: {what}", partial(to, target, partial(_cut, TARGETS[target], size)), ""
        yield f"{target}: a byte more", partial(to, target, partial(_longer, TARGETS[target])), ""


TRUE = {
    "own": {"ranks": 1, "keys": 3, "names": 3, "numbers": 1},
    "group": {"names": 3, "numbers": 1, "record": 0},
    "alone": {"ranks": 1, "names": 3, "numbers": 1},
}
"""Counts that would be no lie."""


def _preamble(name: str, field: int, value: Callable[[int, int], int], directory: Path) -> None:
    data = (directory / name).read_bytes()
    fields = list(forge.PREAMBLE.unpack_from(data))
    if field == 0:
        fields[0] = _changed(int.from_bytes(fields[0], "little"), 64, value).to_bytes(8, "little")
    else:
        fields[field] = _changed(fields[field], 64, value)
    forge.replace_index(directory, forge.PREAMBLE.pack(*fields) + data[32:], name)


def _cut(name: str, size: int, directory: Path) -> None:
    data = (directory / name).read_bytes()
    forge.replace_index(directory, data[: len(data) // 2 if size < 0 else size], name)


def _longer(name: str, directory: Path) -> None:
    forge.replace_index(directory, (directory / name).read_bytes() + b"\0", name)


def contradictions() -> Made:
    """Arrays in another order, twice, or that say other things than the rest."""
    changes: dict[str, Callable[[Index], Any]] = {
        "keys in another order": lambda file: file["keys"].reverse(),
        "two keys of one hash": lambda file: file["keys"][1].update(hash=file["keys"][0]["hash"]),
        "one key twice": lambda file: file["keys"].insert(0, dict(file["keys"][0])),
        "one key less": lambda file: file["keys"].pop(),
        "no keys": lambda file: file.update(keys=[]),
        "names in another order": lambda file: file["names"].reverse(),
        "one name twice": lambda file: file["names"].insert(0, dict(file["names"][0])),
        "no ranks": lambda file: file.update(ranks=[], coordinates=[]),
        "one rank twice": lambda file: file.update(
            ranks=[file["ranks"][0]] * 2, coordinates=[file["coordinates"][0]] * 2
        ),
        "a rank more": lambda file: (
            file["ranks"].append({"rank": 7, "size": 0, "checksum": 0}),
            file["coordinates"].append([7, 0, 7]),
        ),
        "other texts": lambda file: file.update(texts=file["texts"].swapcase()),
        "texts that are no text": lambda file: file.update(texts=b"\xff" * len(file["texts"])),
        "texts of zeros": lambda file: file.update(texts=bytes(len(file["texts"]))),
        "no texts": lambda file: file.update(texts=b""),
        "texts that go on": lambda file: file.update(texts=file["texts"] + b"x"),
        "one row twice": lambda file: forge.add_rows(file, handmade.WEIGHT, forge.rows_of(file, handmade.WEIGHT)[-1:]),
        "one row less": lambda file: forge.drop_row(file, handmade.WEIGHT),
        "rows without boxes": lambda file: [row.update(extent=[0, 0]) for row in file["rows"]],
        "all rows at the origin": lambda file: [row.update(start=[0, 0]) for row in file["rows"]],
        "no rows": lambda file: file.update(rows=[]),
        "no numbers": lambda file: file.update(numbers=[]),
        "a number twice": lambda file: file["numbers"].append(file["numbers"][0]),
        "another save": lambda file: file["header"].update(save="ba9876543210"),
        "another suffix": lambda file: file["header"].update(suffix="-0123456789ab"),
        "no descriptions": lambda file: file["header"].update(entries=[]),
        "no axes": lambda file: (file["header"].update(axes=[]), file.update(coordinates=[[]] * len(file["ranks"]))),
        "hyperparameters that are not in the metadata": lambda file: [
            name.update(value=name["value"] ^ 1) for name in file["names"] if name["kind"] in (0, 3)
        ],
    }
    for what, change in changes.items():
        yield from everywhere(what, change)
    signed = {
        "two rows swapped": lambda file: _swap(file["rows"], 0, -1),
        "the rows of a key swapped": lambda file: _swap(forge.rows_of(file, handmade.WEIGHT), 0, -1),
        "another number": lambda file: file["numbers"][0].update(data=b"\1" * 16),
    }
    for what, change in signed.items():
        yield from everywhere(what, change, SIGNED)


def _swap(rows: list[dict[str, Any]], one: int, other: int) -> None:
    """Their places in the payload are swapped."""
    for field in ("lead", "offset", "length", "checksum", "rank"):
        rows[one][field], rows[other][field] = rows[other][field], rows[one][field]


def values() -> Made:
    """Bytes of a number of other lengths, and of other keys."""
    for count in (0, 1, 2, 3, 5, 8, 15, 16, 17, 1 << 16, 1 << 31):
        yield from everywhere(f"a number of {count} bytes", partial(_length, count=count))
    changes: dict[str, Any] = {"kind": "sharded", "dtype": "float64", "shape": [1], "dtype ": "bool"}
    for field, other in changes.items():
        yield from everywhere(
            f"a number's {field} {other}",
            partial(forge.describe, key=handmade.STEP, **{field.strip(): other}),
        )
    for key in (handmade.WEIGHT, handmade.BIAS):
        yield from everywhere(f"a number of {key}", partial(_as_number, key=key), VERIFIED)


def _length(file: Index, count: int) -> None:
    file["numbers"][0]["bytes"] = count


def _as_number(file: Index, key: str) -> None:
    """A key that has rows says that it has a number."""
    entry = file["header"]["entries"][list(handmade.KEYS).index(key)]
    entry.update(kind="tensor", shape=[])


def boxes() -> Made:
    """Boxes that overlap, overflow or leave holes; shapes that do not fit."""
    for extent in ([0, 3], [2, 0], [1 << 32, 1 << 32], [(1 << 63) - 1, 2], [3, 3], [2, 2], [0, 0], [1 << 63, 2]):
        yield from everywhere(f"extent {extent}", partial(_first, extent=extent), VERIFIED)
    for start in ([1, 0], [3, 0], [(1 << 63) - 1, 0], [0, 1], [1 << 63, 1 << 63], [(1 << 64) - 1, 0]):
        yield from everywhere(f"start {start}", partial(_first, start=start), VERIFIED)
    for shape in ([1 << 62, 1 << 62], [(1 << 63) - 1], [0], [0, 3], [4], [], [4, 3, 1], [1] * 100_000, [2, 3]):
        yield from everywhere(f"shape {str(shape)[:40]}", partial(forge.describe, key=handmade.WEIGHT, shape=shape))


def _first(file: Index, **fields: Any) -> None:
    forge.rows_of(file, handmade.WEIGHT)[0].update(fields)
    key = file["keys"][forge.place_of(file, handmade.WEIGHT)]
    key["origins"] = sum(not any(row["start"]) for row in forge.rows_of(file, handmade.WEIGHT))


def growth() -> Made:
    """Much of everything, with counts that are right."""
    many, ranks_more = 50_000, 2_000

    def rows(file: Index) -> None:
        row = {**forge.rows_of(file, handmade.WEIGHT)[-1], "start": [3, 0], "extent": [1, 3]}
        forge.add_rows(file, handmade.WEIGHT, [row] * many)

    def empty_rows(file: Index) -> None:
        row = {**forge.rows_of(file, handmade.WEIGHT)[-1], "extent": [0, 0]}
        forge.add_rows(file, handmade.WEIGHT, [row] * many)

    def names(file: Index) -> None:
        known = len(file["texts"])
        file["texts"] += b"x" * many
        file["names"] += [{"kind": 2, "rank": 0, "hash": n, "value": 0, "text": known + n + 1} for n in range(many)]

    def long_key(file: Index) -> None:
        file["texts"] = b"x" * 50_000_000 + file["texts"]
        for entry in (*file["keys"], *file["names"]):
            entry["text"] += 50_000_000

    def ranks(file: Index) -> None:
        file["ranks"] += [{"rank": n, "size": 0, "checksum": 0} for n in range(100, 100 + ranks_more)]
        file["coordinates"] += [[n, 0, 0] for n in range(100, 100 + ranks_more)]

    def entries(file: Index) -> None:
        file["header"]["entries"] += file["header"]["entries"][:1] * many

    def other_entries(file: Index) -> None:
        one = file["header"]["entries"][0]
        file["header"]["entries"] += [{**one, "shape": [n, 3]} for n in range(100, 50_000)]

    def record(file: Index) -> None:
        file["record"] = b'{"values":[' + b"[]," * 2_000_000 + b"0]}"

    def long_record(file: Index) -> None:
        file["record"] = b'{"values":"' + b"x" * 100_000_000 + b'"}'

    for change in (rows, empty_rows, names, long_key, ranks, entries, other_entries, record, long_record):
        yield from everywhere(f"growing {change.__name__}", change)
    for target in TARGETS:
        for what, size in {"a gigabyte": 1 << 30, "8 gigabytes": 1 << 33}.items():
            yield f"{target}: {what}", partial(to, target, partial(_sparse, TARGETS[target], size)), ""


def _sparse(name: str, size: int, directory: Path) -> None:
    with (directory / name).open("r+b") as file:
        file.truncate(size)
    forge.sign_index(directory, name, forge.checksum(b""))


def all_made() -> dict[str, Iterator[tuple[str, Build, str]]]:
    """Attacks by kind."""
    return {
        "numbers in index files": numbers(),
        "counts in index files": counts(),
        "contradictions in index files": contradictions(),
        "values of numbers": values(),
        "boxes and shapes": boxes(),
        "index files that grow": growth(),
    }

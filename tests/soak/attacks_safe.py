"""Attacks on this format by someone who can sign: names, files, numbers, shapes, dtypes, code."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.soak import attacks_json, attacks_rows, forge
from tests.soak.attacks_json import Build, Made
from tests.soak.forge import MANIFEST, PAYLOAD, TABLE
from tests.soak.hostile import CANARY, SIDE, Attack, by_name
from tests.unit import handmade

NAMES: dict[str, str] = {
    "parent": f"../{SIDE}",
    "through a folder": f"sub/../../{SIDE}",
    "absolute": "/etc/hostname",
    "nul": "a\0b",
    "backslash": f"..\\{SIDE}",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "current": f"./{PAYLOAD}",
    "trailing slash": f"{PAYLOAD}/",
    "double slash": "sub//x",
    "leading slash": f"/{PAYLOAD}",
    "too long": "x" * 300,
    "too deep": "/".join(["d"] * 3000),
    "surrogate": "\ud800",
    "absent": "absent",
}
DTYPES = ("__class__", "load", "Tensor", "float", "torch.float32", "", "float16\0", "ops", "bfloat17", "distributed")


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    return by_name(
        {
            "file names": names(),
            "links and special files": special_files(),
            "numbers in rows": attacks_rows.numbers(),
            "numbers in tables": attacks_rows.scalars(),
            "boxes and shapes": boxes(),
            "dtypes": dtypes(),
            "JSON": attacks_json.texts(),
            "typed values": attacks_json.typed_values(),
            "structure": structure(),
            "code in records": code(),
            "untouched": untouched(),
        }
    )


def names() -> Made:
    """Names that lead elsewhere, wherever a name stands."""

    def entry(name: str) -> dict[str, Any]:
        return {"name": name, "size": 6000, "checksum": forge.checksum(b"secret" * 1000)}

    for what, name in NAMES.items():
        listed = entry(name)
        yield f"{what} in files", forge.edit_manifest(partial(forge.put, path=("files",), value=[listed])), ""
        table = {**listed, "rank": 0}
        yield f"{what} in tables", forge.edit_manifest(partial(forge.put, path=("tables", 0), value=table)), ""
        yield f"{what} in a header", forge.edit_table(partial(forge.put, path=(0, "files", 0), value=listed)), ""


def special_files() -> Made:
    """What is there in place of a file."""

    def linked(name: str, directory: Path) -> None:
        (directory / name).rename(directory.parent / "moved")
        (directory / name).symlink_to(directory.parent / "moved")

    def dangling(name: str, directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(directory / "nowhere")

    def fifo(name: str, directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    def folder(name: str, directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    for name, make in itertools.product(
        (MANIFEST, TABLE, PAYLOAD, "extra", "sub/extra"), (linked, dangling, fifo, folder)
    ):
        yield f"{make.__name__} {name}", partial(after, with_extra_files, partial(make, name)), ""

    def linked_folder(directory: Path) -> None:
        (directory / "sub").rename(directory.parent / "moved")
        (directory / "sub").symlink_to(directory.parent / "moved")

    yield "linked sub", partial(after, with_extra_files, linked_folder), ""


def after(first: Build, then: Build, directory: Path) -> None:
    """Two changes, one after the other."""
    first(directory)
    then(directory)


def with_extra_files(directory: Path) -> None:
    """Two listed files, one in a folder."""
    body = forge.read_manifest(directory)
    (directory / "sub").mkdir()
    for name in ("extra", "sub/extra"):
        (directory / name).write_bytes(b"more")
    body["files"] = [{"name": n, "size": 4, "checksum": forge.checksum(b"more")} for n in ("extra", "sub/extra")]
    forge.sign(directory, body)


def boxes() -> Made:
    """Boxes that overlap, overflow or leave holes."""
    for sizes in ([0, 3], [2, 0], [1 << 32, 1 << 32], [(1 << 63) - 1, 2], [2], [2, 3, 1], []):
        yield f"size {sizes}", forge.edit_row(5, sizes), ""
    for offset in ([1, 0], [3, 0], [(1 << 63) - 1, 0], [0], [0, 0, 0]):
        yield f"offset {offset}", forge.edit_row(4, offset), ""
    for shape in ([1 << 62, 1 << 62], [(1 << 63) - 1], [0], [0, 3], [4], [], [4, 3, 1], [1] * 100_000):
        path = ("keys", handmade.WEIGHT, "shape")
        yield f"shape {str(shape)[:40]}", forge.edit_manifest(partial(forge.put, path=path, value=shape)), ""
    yield "one chunk twice", forge.edit_table(_one_more), ""
    yield "one chunk less", forge.edit_table(_one_less), ""
    zero = {"dtype": "float32", "shape": [0, 1 << 62]}
    reason = "a tensor without elements has no chunks"
    yield "no elements", forge.edit_manifest(partial(forge.put, path=("keys", "model.none"), value=zero)), reason


def _one_more(lines: list[Any]) -> None:
    lines.append(lines[1])
    lines[0]["chunks"] += 1


def _one_less(lines: list[Any]) -> None:
    lines.pop()
    lines[0]["chunks"] -= 1


def dtypes() -> Made:
    """Names that are no dtype, and every dtype that there is."""
    for name in DTYPES:
        path = ("keys", handmade.BIAS, "dtype")
        yield f"named {name!r}", forge.edit_manifest(partial(forge.put, path=path, value=name)), ""
    reason = "a dtype of torch, whose elements are as long as recorded"
    for name, dtype in sorted(vars(torch).items()):
        if isinstance(dtype, torch.dtype):
            yield f"torch.{name}", partial(_as_dtype, name, dtype.itemsize), reason


def _as_dtype(name: str, itemsize: int, directory: Path) -> None:
    """The bias, 24 bytes in the second table, as another dtype."""
    count = 24 // itemsize
    lines = [json.loads(line) for line in (directory / handmade.table(1)).read_bytes().splitlines()]
    row = next(line for line in lines[1:] if line[0] == handmade.BIAS)
    row[3], row[5] = count * itemsize, [count]
    forge.replace_table(directory, "".join(json.dumps(line) + "\n" for line in lines).encode(), 1)
    body = forge.read_manifest(directory)
    body["keys"][handmade.BIAS].update(dtype=name, shape=[count])
    forge.sign(directory, body)


def structure() -> Made:
    """Files that contradict each other."""

    def twice(body: dict[str, Any]) -> None:
        body["tables"].append(body["tables"][0])

    def one_rank(body: dict[str, Any]) -> None:
        body["tables"][1]["rank"] = 0

    def declare(lines: list[Any]) -> None:
        lines[0]["keys"][handmade.BIAS] = {"dtype": "int64", "shape": [3]}

    def same_file(lines: list[Any]) -> None:
        lines[0]["files"].append(lines[0]["files"][0])

    yield "a table twice", forge.edit_manifest(twice), ""
    yield "two tables of one rank", forge.edit_manifest(one_rank), ""
    yield (
        "a rank of 2**63-1",
        forge.edit_manifest(partial(forge.put, path=("tables", 0, "rank"), value=(1 << 63) - 1)),
        "",
    )
    yield (
        "a key in two headers",
        forge.edit_table(declare),
        "the manifest's keys count, and the headers' are the writer's",
    )
    yield "a file twice in a header", forge.edit_table(same_file), "both names are the same plain file"
    yield "no tables", forge.edit_manifest(partial(forge.put, path=("tables",), value=[])), ""
    yield (
        "five million names without state",
        forge.edit_table(lambda lines: lines[0].update(stateless=["x"] * 5_000_000)),
        "a list of names, bounded by the line",
    )
    yield "a newer major version", forge.edit_manifest(partial(forge.put, path=("version",), value=[2, 0])), ""
    yield (
        "a newer minor version",
        forge.edit_manifest(partial(forge.put, path=("version",), value=[1, 9])),
        ("minor versions add fields only"),
    )


def code() -> Made:
    """Pickles where this format has bytes that nobody unpickles."""
    evil = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()

    def in_a_record(directory: Path) -> None:
        raw = struct.pack("<3q", 5, 6, 7)
        data = raw + evil
        path = directory / handmade.payload(1)
        lines = [json.loads(line) for line in (directory / handmade.table(1)).read_bytes().splitlines()]
        row = next(line for line in lines[1:] if line[0] == handmade.BIAS)
        start = path.stat().st_size
        path.write_bytes(path.read_bytes() + data)
        row[2], row[6], row[7], row[8] = start, forge.checksum(data), start, len(data)
        lines[0]["files"][0].update(size=start + len(data))
        forge.replace_table(directory, "".join(json.dumps(line) + "\n" for line in lines).encode(), 1)

    def beside(directory: Path) -> None:
        (directory / ".metadata").write_bytes(evil)

    def as_manifest(directory: Path) -> None:
        (directory / MANIFEST).write_bytes(evil)

    yield "in a record", in_a_record, "elements are read where the row says, the record is not unpickled"
    yield "in .metadata beside a manifest", beside, "not read where there is a manifest"
    yield "as manifest", as_manifest, ""


def untouched() -> Made:
    """What all attacks of this module begin with must be good."""
    yield "handmade", forge.edit_manifest(lambda body: None), "good"
    yield "with other files", with_extra_files, "good"
    yield "with a table written again", forge.edit_table(lambda lines: None), "good"

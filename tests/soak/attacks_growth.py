# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Attacks on the reader of stock checkpoints by size: small pickles that grow; and tracker files."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak.attacks_json import Made
from tests.soak.attacks_stock import KEY, WEIGHT, on_stock, place_record, raw, rewritten
from tests.soak.hostile import SIDE, Attack, by_name


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    return by_name({"pickles that grow": growth(), "tracker": trackers()}, stock=True)


def _nested(open_with: bytes, close_with: bytes, depth: int) -> bytes:
    return open_with * depth + close_with * depth + b"."


def laughs(depth: int, kind: type) -> Any:
    """2**depth items in memory of `depth`."""
    value: Any = kind(())
    for _ in range(depth):
        value = kind((value, value))
    return value


def growth() -> Made:
    """Small pickles that want much memory or time."""
    pickles: dict[str, bytes] = {
        "bytes of 2**62": b"\x8e" + struct.pack("<Q", 1 << 62) + b".",
        "text of 2**62": b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
        "bytearray of 2**40": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "a frame of 2**40": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
        "a memo place of 2**31": b"Nr" + struct.pack("<I", 1 << 31) + b".",
        "an integer of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
        "an integer of 2**31 bytes": b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b".",
        "a million tuples": _nested(b"(", b"t", 1_000_000),
        "a million lists": _nested(b"]", b"a", 1_000_000),
        "nothing": b"",
        "only a stop": b".",
        "zeros": bytes(1000),
    }
    for what, data in pickles.items():
        yield what, partial(on_stock, partial(raw, data)), ""
    changes: dict[str, Callable[[Any], Any]] = {
        "a list of 10**15 places": lambda found: found.planner_data.update(iteration=("iteration", 10**15)),
        "nested lists as offset": lambda found: setattr(found.storage_data[WEIGHT], "offset", laughs(40, list)),
        "nested lists as name": lambda found: setattr(found.storage_data[WEIGHT], "relative_path", laughs(40, list)),
        "nested lists as size": lambda found: found.state_dict_metadata[KEY].__dict__.update(size=laughs(40, list)),
        "nested lists as offsets": lambda found: (
            found.state_dict_metadata[KEY].chunks[0].__dict__.update(offsets=laughs(40, list))
        ),
        "nested lists as dtype": lambda found: found.state_dict_metadata[KEY].properties.__dict__.update(
            dtype=laughs(40, list)
        ),
        "nested tuples as path": lambda found: found.planner_data.update(iteration=("iteration", laughs(40, tuple))),
    }
    for what, change in changes.items():
        yield what, partial(on_stock, partial(rewritten, change)), ""
    yield "a gigabyte of metadata", partial(on_stock, partial(_sparse, 1 << 30)), ""
    yield "8 gigabytes of metadata", partial(on_stock, partial(_sparse, 1 << 33)), ""
    yield "a record that unzips to 1 GB", partial(on_stock, _zip_bomb), ""


def _sparse(size: int, directory: Path) -> None:
    with (directory / ".metadata").open("r+b") as file:
        file.truncate(0)
        file.truncate(size)


def _zip_bomb(directory: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w") as entry:
            for _ in range(64):
                entry.write(bytes(1 << 24))
        archive.writestr("archive/version", "3\n")
    place_record(buffer.getvalue(), directory)


def trackers() -> Made:
    """Tracker files that lead elsewhere."""
    contents: dict[str, bytes] = {
        "parent": b"../iter_0000010",
        "absolute": b"/etc",
        "a million digits": b"9" * 1_000_000,
        "nul": b"a\0b",
        "nothing": b"",
        "negative": b"-1",
        "invalid UTF-8": b"\xff\xfe",
        "absent": b"7",
        "foreign digits": "٣".encode(),
    }
    for what, data in contents.items():
        yield what, partial(_tracker, partial(_with_bytes, data)), ""
    yield "a gigabyte", partial(_tracker, _sparse_file), ""
    yield "a link outside", partial(_tracker, lambda path: path.symlink_to(f"../{SIDE}")), ""
    yield "a fifo", partial(_tracker, os.mkfifo), ""


def _with_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def _tracker(make: Callable[[Path], Any], directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    make(directory / "latest_checkpointed_iteration.txt")

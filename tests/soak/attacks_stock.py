# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Attacks on the reader of stock checkpoints: pickles that run code, and metadata that lies."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.soak.attacks_json import Made
from tests.soak.attacks_safe import NAMES
from tests.soak.hostile import CANARY, SIDE, Attack, by_name

KEY = "model.weight"
TOUCH = f"touch {CANARY}"
CODE = f"open('{CANARY}', 'w')"
WEIGHT = metadata.MetadataIndex(KEY, torch.Size([0]))

CALLS: dict[str, tuple[str, str, str]] = {
    "os.system": ("os", "system", TOUCH),
    "posix.system": ("posix", "system", TOUCH),
    "subprocess.getoutput": ("subprocess", "getoutput", TOUCH),
    "builtins.exec": ("builtins", "exec", CODE),
    "builtins.eval": ("builtins", "eval", CODE),
    "builtins.__import__": ("builtins", "__import__", "this"),
    "io.FileIO": ("_io", "FileIO", CANARY),
    "pathlib.Path.touch": ("pathlib", "Path.touch", CANARY),
    "torch.load": ("torch", "load", CANARY),
    "torch.os.system": ("torch", "os.system", TOUCH),
    "torch.serialization.os.system": ("torch.serialization", "os.system", TOUCH),
    "torch.hub.load": ("torch.hub", "load", CANARY),
    "metadata.os.system": ("torch.distributed.checkpoint.metadata", "os.system", TOUCH),
    "numpy.load": ("numpy", "load", SIDE),
    "numpy.fromfile": ("numpy", "fromfile", f"../{SIDE}"),
    "numpy.runstring": ("numpy.testing._private.utils", "runstring", CODE),
    "importlib.import_module": ("importlib", "import_module", "this"),
    "pickle.loads": ("_pickle", "loads", "x"),
    "runpy.run_path": ("runpy", "run_path", SIDE),
    "functools.partial": ("functools", "partial", "x"),
    "operator.methodcaller": ("operator", "methodcaller", "x"),
}


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


OPCODES: dict[str, Callable[[str, str, str], bytes]] = {
    "GLOBAL REDUCE": lambda m, n, a: f"c{m}\n{n}\n".encode() + b"(" + _text(a) + b"tR.",
    "STACK_GLOBAL REDUCE": lambda m, n, a: b"\x80\x04" + _text(m) + _text(n) + b"\x93(" + _text(a) + b"tR.",
    "INST": lambda m, n, a: b"(" + _text(a) + f"i{m}\n{n}\n.".encode(),
    "OBJ": lambda m, n, a: b"(" + f"c{m}\n{n}\n".encode() + _text(a) + b"o.",
    "NEWOBJ": lambda m, n, a: b"\x80\x02" + f"c{m}\n{n}\n".encode() + b"(" + _text(a) + b"t\x81.",
    "NEWOBJ_EX": lambda m, n, a: b"\x80\x04" + _text(m) + _text(n) + b"\x93(" + _text(a) + b"t}\x92.",
    "BUILD": lambda m, n, a: (
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81"
        + b"}" + _text("__setstate__") + f"c{m}\n{n}\n".encode() + b"sb" + _text(a) + b"b."
    ),
    "REDUCE of a dotted dunder": lambda m, n, a: (
        b"\x80\x04" + _text("torch.distributed.checkpoint.metadata") + _text("Metadata.__init__.__globals__")
        + b"\x93(" + _text(a) + b"tR."
    ),
    "EXT1": lambda m, n, a: b"\x80\x02\x82\x01(" + _text(a) + b"tR.",
    "EXT2": lambda m, n, a: b"\x80\x02\x83\x01\x00(" + _text(a) + b"tR.",
    "EXT4": lambda m, n, a: b"\x80\x02\x84\x01\x00\x00\x00(" + _text(a) + b"tR.",
    "PERSID": lambda m, n, a: f"P{a}\n.".encode(),
    "BINPERSID": lambda m, n, a: _text(a) + b"Q.",
}  # fmt: skip


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    yield from (
        (name, replace(attack, address_space=1 << 40))  # what is mapped and not touched costs nothing
        for name, attack in by_name({"claims of a pickle": claims()}, stock=True)
    )
    yield from by_name(
        {
            "code in .metadata": code_in_metadata(),
            "code in stock records": code_in_records(),
            "stock metadata": lies(),
            "stock file names": names(),
            "stock files": files(),
            "untouched": untouched(),
        },
        stock=True,
    )


def stock(directory: Path) -> None:
    """In place of what is there: a checkpoint that torch wrote."""
    for path in directory.iterdir():
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"weight": torch.ones(6)}, "iteration": 10}
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def on_stock(build: Callable[[Path], Any], directory: Path) -> None:
    """Make a stock checkpoint, then the attack."""
    stock(directory)
    build(directory)


def made(cases: Iterator[tuple[str, Callable[[Path], Any], str]]) -> Made:
    """The same, on a stock checkpoint."""
    return ((name, partial(on_stock, build), harmless) for name, build, harmless in cases)


def raw(data: bytes, directory: Path) -> None:
    """Other metadata."""
    (directory / ".metadata").write_bytes(data)


def rewritten(change: Callable[[Any], Any], directory: Path) -> None:
    """Change the metadata and pickle it again."""
    path = directory / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def code_in_metadata() -> Made:
    """Every way to name and call something."""
    cases = itertools.product(OPCODES.items(), CALLS.items())
    return made((f"{opcode} {what}", partial(raw, make(*call)), "") for (opcode, make), (what, call) in cases)


def code_in_records() -> Made:
    """The same in a tensor's record: as a bare pickle and inside torch's zip archive."""
    for (opcode, make), (what, call) in itertools.product(OPCODES.items(), CALLS.items()):
        yield f"{opcode} {what}, bare", partial(on_stock, partial(place_record, make(*call))), ""
        yield f"{opcode} {what}, zipped", partial(on_stock, partial(place_record, _archive(make(*call)))), ""


CLAIMS: dict[str, bytes] = {
    "BINBYTES of 3 GB": b"B" + struct.pack("<I", 3 << 30),
    "BINBYTES8 of 2**62": b"\x8e" + struct.pack("<Q", 1 << 62),
    "BINUNICODE of 3 GB": b"X" + struct.pack("<I", 3 << 30),
    "BINUNICODE8 of 2**40": b"\x8d" + struct.pack("<Q", 1 << 40),
    "BYTEARRAY8 of 8 GB": b"\x96" + struct.pack("<Q", 8 << 30),
    "LONG4 of 2 GB": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "FRAME of 2**62": b"\x95" + struct.pack("<Q", 1 << 62),
    "LONG_BINPUT at 2**28": b"Nr" + struct.pack("<I", 1 << 28),
    "PUT at 10**9": b"Np1000000000\n",
}


def claims() -> Made:
    """Instructions that claim more than the file has: long strings, far places in the memo."""
    for what, instruction in CLAIMS.items():
        data = b"\x80\x05" + instruction + b"N."
        yield f"{what} in .metadata", partial(on_stock, partial(raw, data)), ""
        yield f"{what} in a record, bare", partial(on_stock, partial(place_record, data)), ""
        yield f"{what} in a record, zipped", partial(on_stock, partial(place_record, _archive(data))), ""


def _archive(data: bytes, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **settings) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def place_record(data: bytes, directory: Path) -> None:
    """Other bytes where the weight's record is."""
    (directory / "evil.distcp").write_bytes(data)
    place = _StorageInfo("evil.distcp", 0, len(data))
    rewritten(lambda found: found.storage_data.update({WEIGHT: place}), directory)


WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "float": 0.0,
    "1e308": 1e308,
    "negative": -1,
    "2**62": 1 << 62,
    "2**63": 1 << 63,
    "2**64": 1 << 64,
    "of 6000 digits": 1 << 20_000,
    "text": "x",
    "bytes": b"x",
    "list": [],
    "tuple": (),
    "mapping": {},
    "dtype": torch.float32,
}

FIELDS: dict[str, Callable[[Any, Any], Any]] = {
    "offset": lambda found, value: setattr(found.storage_data[WEIGHT], "offset", value),
    "length": lambda found, value: setattr(found.storage_data[WEIGHT], "length", value),
    "relative_path": lambda found, value: setattr(found.storage_data[WEIGHT], "relative_path", value),
    "storage_data": lambda found, value: setattr(found, "storage_data", value),
    "a place": lambda found, value: found.storage_data.update({WEIGHT: value}),
    "state_dict_metadata": lambda found, value: setattr(found, "state_dict_metadata", value),
    "a tensor": lambda found, value: found.state_dict_metadata.update({KEY: value}),
    "size": lambda found, value: found.state_dict_metadata[KEY].__dict__.update(size=value),
    "a size": lambda found, value: found.state_dict_metadata[KEY].__dict__.update(size=(value,)),
    "properties": lambda found, value: found.state_dict_metadata[KEY].__dict__.update(properties=value),
    "dtype": lambda found, value: found.state_dict_metadata[KEY].properties.__dict__.update(dtype=value),
    "chunks": lambda found, value: found.state_dict_metadata[KEY].__dict__.update(chunks=value),
    "a chunk": lambda found, value: found.state_dict_metadata[KEY].__dict__.update(chunks=[value]),
    "chunk offsets": lambda found, value: found.state_dict_metadata[KEY].chunks[0].__dict__.update(offsets=(value,)),
    "chunk sizes": lambda found, value: found.state_dict_metadata[KEY].chunks[0].__dict__.update(sizes=(value,)),
    "planner_data": lambda found, value: setattr(found, "planner_data", value),
    "a path": lambda found, value: found.planner_data.update(iteration=value),
    "a path's end": lambda found, value: found.planner_data.update(iteration=("iteration", value)),
}
HARMLESS: dict[str, str] = {
    "mapping as state_dict_metadata": "a checkpoint of nothing: a load misses its keys",
    "dtype as dtype": "the right one",
    **{f"{what} as a tensor": "not a tensor: a load misses the key" for what in WRONG},
    **{
        f"{what} as planner_data": "no paths: a checkpoint without values"
        for what in ("null", "float", "list", "tuple", "mapping")
    },
    **{
        f"{what} as a path": "a path of no value that is read"
        for what in ("null", "float", "text", "bytes", "list", "tuple", "mapping")
    },
    **{
        f"{what} as a path's end": "a name in a mapping"
        for what in ("null", "true", "float", "1e308", "text", "bytes", "tuple", "dtype")
    },
}


def lies() -> Made:
    """Every field of the metadata with a value of every wrong type."""
    for (field, change), (what, value) in itertools.product(FIELDS.items(), WRONG.items()):
        build = partial(on_stock, partial(rewritten, partial(_changed, change, value)))
        yield f"{what} as {field}", build, HARMLESS.get(f"{what} as {field}", "")


def _changed(change: Callable[[Any, Any], Any], value: Any, found: Any) -> None:
    change(found, value)


def names() -> Made:
    """Names that lead elsewhere."""
    for what, name in NAMES.items():
        change = partial(_changed, FIELDS["relative_path"], name)
        yield what, partial(on_stock, partial(rewritten, change)), ""


def files() -> Made:
    """What is there in place of a file."""

    def replaced(name: str, make: Callable[[Path], Any], directory: Path) -> None:
        (directory / name).rename(directory.parent / "moved")
        make(directory / name)

    makers: dict[str, Callable[[Path], Any]] = {
        "link": lambda path: path.symlink_to(path.parents[1] / "moved"),
        "dangling link": lambda path: path.symlink_to("nowhere"),
        "fifo": os.mkfifo,
        "folder": Path.mkdir,
        "empty file": Path.touch,
    }
    for name, (what, make) in itertools.product((".metadata", "__0_0.distcp"), makers.items()):
        yield f"{what} as {name}", partial(on_stock, partial(replaced, name, make)), ""


def untouched() -> Made:
    """What all attacks of this module begin with must be good."""
    yield "stock", stock, "good"

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Attacks on this format by someone who can sign: names, files, numbers, shapes, dtypes, code."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.soak import attacks_index, attacks_json, forge
from tests.soak.attacks_index import everywhere, on
from tests.soak.attacks_json import Build, Made
from tests.soak.forge import GROUP, MANIFEST, OWN, PAYLOAD, Index
from tests.soak.hostile import CANARY, SIDE, SIGNED, VERIFIED, Attack, by_name
from tests.unit import handmade, index_bytes

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
            **attacks_index.all_made(),
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
        group = {**listed, "rank": 0}
        yield f"{what} in index", forge.edit_manifest(partial(forge.put, path=("index", 0), value=group)), ""
        yield f"{what} as suffix", partial(_as_token, "suffix", name), "there is none" if not name else ""
        yield f"{what} as save", partial(_as_token, "save", name), ""


def _as_token(field: str, text: str, directory: Path) -> None:
    """The manifest and all index files agree."""
    forge.edit_manifest(partial(forge.put, path=(field,), value=text))(directory)
    for name in (GROUP, OWN, handmade.index(1)):
        forge.edit_index(partial(forge.put, path=("header", field), value=text), name)(directory)


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
        (MANIFEST, GROUP, OWN, PAYLOAD, "extra", "sub/extra"), (linked, dangling, fifo, folder)
    ):
        target = {GROUP: "group: ", OWN: "own: "}.get(name, "")
        yield f"{target}{make.__name__} {name}", partial(after, with_extra_files, partial(make, name)), ""

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


def dtypes() -> Made:
    """Names that are no dtype, and every dtype that there is."""
    for name in DTYPES:
        reason = SIGNED if name == "float" else ""  # torch has the name
        yield from everywhere(f"named {name!r}", partial(forge.describe, key=handmade.WEIGHT, dtype=name), reason)
    reason = "a dtype of torch, whose elements are as long as recorded"
    for name, dtype in sorted(vars(torch).items()):
        if isinstance(dtype, torch.dtype):
            yield f"torch.{name}", on("alone", partial(_as_dtype, name, dtype.itemsize)), reason


def _as_dtype(name: str, itemsize: int, file: Index) -> None:
    """The bias, of 24 bytes, as another dtype."""
    count = 24 // itemsize
    forge.rows_of(file, handmade.BIAS)[0]["extent"] = [count, 0]
    forge.describe(file, handmade.BIAS, dtype=name, shape=[count])


def structure() -> Made:
    """Files that contradict each other."""

    def twice(body: dict[str, Any]) -> None:
        body["index"].append(body["index"][0])

    def again(body: dict[str, Any]) -> None:
        body["index"].append({**body["index"][0], "rank": 1})

    def also_own(directory: Path) -> None:
        body = forge.read_manifest(directory)
        body["index"].append({"name": OWN, "rank": 1, "size": 0, "checksum": ""})
        forge.sign(directory, body)
        forge.sign_index(directory, OWN, forge.checksum((directory / OWN).read_bytes()))

    def field(*path: str | int, value: Any) -> Build:
        return forge.edit_manifest(partial(forge.put, path=path, value=value))

    yield "an index twice", forge.edit_manifest(twice), ""
    yield "an index twice, of two groups", forge.edit_manifest(again), ""
    yield "a rank in two groups", also_own, VERIFIED
    yield "a rank of 2**63-1", field("index", 0, "rank", value=(1 << 63) - 1), "only tells one group from another"
    yield "no index", field("index", value=[]), VERIFIED
    for what, name in {"another rank's file": handmade.index(1), "the group's file": GROUP}.items():
        yield f"own: {what}", partial(_copied, name, OWN), ""
    yield "group: a rank's file", partial(_copied, OWN, GROUP), ""
    yield "own: no file", lambda directory: (directory / OWN).unlink(), ""
    yield "group: no file", lambda directory: (directory / GROUP).unlink(), ""
    yield "group: a record", forge.edit_index(partial(forge.put, path=("record",), value=b'{"values":1}')), ""
    yield "no hyperparameters", field("hyperparameters", value={}), ""
    for name, true in {"keys": len(handmade.KEYS), "chunks": 6, "states": 0}.items():
        reason = VERIFIED if name == "keys" else "it tells how much there is to do, no more"
        for count in (0, true + 1, 1 << 31, (1 << 63) - 1):
            yield f"{count} {name}", field(name, value=count), reason if count != true else "as many as there are"
    for world in (0, 1, (1 << 63) - 1, "two"):
        yield f"world {world}", field("topology", "world", value=world), "tells nobody where bytes are"
    yield "a million slots", field("slots", value=["x"] * 1_000_000), "names, bounded by the manifest's size"
    yield "no slots", field("slots", value=[]), "who can sign can leave out what there is"
    yield "an unknown family", field("families", value={"x/1": "y"}), "keys say which families they need"
    yield "a newer major version", field("version", value=[2, 0]), ""
    yield "a newer minor version", field("version", value=[1, 9]), "minor versions add fields only"


def _copied(source: str, name: str, directory: Path) -> None:
    forge.replace_index(directory, (directory / source).read_bytes(), name)


def code() -> Made:
    """Pickles where this format has bytes that nobody unpickles."""
    evil = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()

    def in_a_record(directory: Path) -> None:
        forge.alone(directory)
        data = struct.pack("<3q", 5, 6, 7) + evil
        path = directory / PAYLOAD
        start = path.stat().st_size
        path.write_bytes(path.read_bytes() + data)

        def point(file: Index) -> None:
            row = {"offset": start, "length": len(data), "lead": 0, "checksum": index_bytes.hashed(data)}
            forge.rows_of(file, handmade.BIAS)[0].update(row)
            file["ranks"][0].update(size=start + len(data), checksum=index_bytes.hashed(path.read_bytes()))

        forge.edit_index(point, OWN)(directory)

    def beside(directory: Path) -> None:
        (directory / ".metadata").write_bytes(evil)

    def as_manifest(directory: Path) -> None:
        (directory / MANIFEST).write_bytes(evil)

    yield "in a record", in_a_record, "elements are read where the row says, the record is not unpickled"
    yield "in .metadata beside a manifest", beside, "not read where there is a manifest"
    yield "as manifest", as_manifest, ""
    yield "own: as index", lambda directory: forge.replace_index(directory, evil, OWN), ""
    yield "group: as index", lambda directory: forge.replace_index(directory, evil), ""


def untouched() -> Made:
    """What all attacks of this module begin with must be good."""
    yield "handmade", forge.edit_manifest(lambda body: None), "good"
    yield "with other files", with_extra_files, "good"
    for target in attacks_index.TARGETS:
        yield f"with the index written again, {target}", on(target, lambda file: None), "good"

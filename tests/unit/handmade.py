# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint of two ranks made by hand, file by file, without the code that saves."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from mbridge_fsdp_ckpt.format.manifest import manifest_bytes, read_manifest
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest
from mbridge_fsdp_ckpt.format.values import encode
from mbridge_fsdp_ckpt.io.files import file_checksum
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import index_bytes

NAME = "module.module.weight"
WEIGHT, AVERAGE = "model.weight", f"optimizer.state.{NAME}.exp_avg"
STEP, BIAS = f"optimizer.state.{NAME}.step", "model.bias"

TENSORS = {
    WEIGHT: torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    AVERAGE: torch.linspace(-1, 1, 12).reshape(4, 3),
    STEP: torch.tensor(7.0),
    BIAS: torch.tensor([5, 6, 7]),
}
KEYS = {
    key: KeyEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    for key, tensor in TENSORS.items()
} | {STEP: KeyEntry(dtype="float32", shape=(), kind="tensor")}
VALUES = {"iteration": 10, "opt_param_scheduler": {"max_lr": 1e-4, "steps": (1, 2)}}
HYPERPARAMETERS = {"lr": 0.1, "betas": (0.9, 0.95)}

UPPER, LOWER = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
HELD = {
    0: [(WEIGHT, UPPER), (AVERAGE, UPPER), (STEP, Box((), ()))],
    1: [(WEIGHT, LOWER), (AVERAGE, LOWER), (BIAS, Box((0,), (3,)))],
}
COPIED = {0: [], 1: [STEP]}


Part = dict[str, Any]
"""An index file, or something in it, taken apart."""

Change = Callable[[Part], Any]


def without_tensors() -> bytes:
    """Metadata of a whole checkpoint without tensors: no other file belongs to it."""
    empty = Manifest(
        format=FORMAT_NAME, version=VERSION, save=SAVE, writer={}, topology={}, sections=(), keys=0, chunks=0, index=(),
        values={},
    )  # fmt: skip
    return manifest_bytes(empty)


def stock_without_tensors() -> bytes:
    """The same of stock, which has a tensor without elements."""
    tensor = TensorStorageMetadata(properties=TensorProperties(dtype=torch.float32), size=torch.Size([0]), chunks=[])
    return pickle.dumps(Metadata(state_dict_metadata={"model.nothing": tensor}, planner_data={}, storage_data={}))


def payload(rank: int) -> str:
    """Name of a rank's payload file."""
    return f"__{rank}_0.distcp"


def index(rank: int) -> str:
    """Name of a rank's own index file."""
    return f"rank_{rank:05d}.index"


GROUP = "group_00000.index"
SAVE = "0123456789ab"
SETS = {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}
SET = index_bytes.hashed(json.dumps(SETS, sort_keys=True, separators=(",", ":")).encode())
PARAM_GROUP = f"{index_bytes.hashed(NAME.encode()):016x}"
ENTRIES = [{**KEYS[key].model_dump(mode="json")} for key in KEYS]


def make(directory: Path, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Path:
    """Write the checkpoint; returns the directory."""
    directory.mkdir()
    write_head(directory, [make_rank(directory, rank, tensors) for rank in HELD])
    return directory


def make_rank(directory: Path, rank: int, tensors: Mapping[str, torch.Tensor] = TENSORS) -> dict[str, Any]:
    """Write one rank's payload and index file; returns the index, taken apart."""
    writer = PayloadWriter(directory / payload(rank))
    keys: dict[str, dict[str, Any]] = {}
    for key, box in HELD[rank]:
        part = tensors[key][box.slices_in(whole(tuple(tensors[key].shape)))].reshape(-1)
        held = keys.setdefault(key, {"key": key, "entry": list(KEYS).index(key)})
        if not KEYS[key].is_sharded:
            held["data"] = part.numpy().tobytes()
            continue
        chunk = writer.add(key, part, box)
        row: Part = {"lead": chunk.lead, "offset": chunk.record.offset, "length": chunk.record.length}
        row |= {"checksum": chunk.checksum, "start": list(box.offset), "extent": list(box.size)}
        held.setdefault("rows", []).append(row)
    keys |= {
        key: {"key": key, "entry": list(KEYS).index(key), "data": tensors[key].numpy().tobytes(), "copy": True}
        for key in COPIED[rank]
    }
    file = writer.close()
    states = {f"(0, {rank})": [{"torch_rng_state": torch.tensor([rank], dtype=torch.uint8)}]}
    found = index_bytes.own(
        rank,
        save=SAVE,
        coordinates={"rank": rank, "pipeline": 0, "tensor": rank},
        payload=(file.size, int(file.checksum.rpartition(":")[2], 16)),
        entries=ENTRIES,
        keys=list(keys.values()),
        names=[*([] if rank else [(0, NAME, SET)]), (3, PARAM_GROUP, SET), (1, f"module.module.frozen{rank}", 0)],
        record={"values": encode({"rng_state": states}), "extra_state": None},
    )
    (directory / index(rank)).write_bytes(index_bytes.encode(found))
    return found


def grouped(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The group's index file of ranks' own, taken apart: merged key by key, as docs/format.md says."""
    entries = [entry for part in parts for entry in part["header"]["entries"]]
    entries = [entry for place, entry in enumerate(entries) if entry not in entries[:place]]
    axes = list(dict.fromkeys(axis for part in parts for axis in part["header"]["axes"]))
    dimensions = max(part["header"]["dimensions"] for part in parts)
    keys: dict[bytes, dict[str, Any]] = {}
    names: dict[tuple[Any, ...], tuple[dict[str, Any], bytes]] = {}
    for number, part in enumerate(parts):
        texts = texts_of(part)
        for entry, text in zip(part["keys"], texts, strict=False):
            description = part["header"]["entries"][entry["entry"]]
            if description["kind"] != "sharded" and not entry["origins"]:
                continue  # a copy
            held = keys.setdefault(text, {"entry": entries.index(description), "origins": 0, "rows": []})
            held["origins"] += entry["origins"]
            held["kind"] = "rows" if description["kind"] == "sharded" else "numbers"
            found = part[held["kind"]][entry["first"] : entry["first"] + entry["count"]]
            held["rows"] += [widened(row, dimensions) | {"rank": number} for row in found]
        for entry, text in zip(part["names"], texts[len(part["keys"]) :], strict=True):
            if entry["kind"] == 3:
                continue  # a param group
            place = entry["kind"], entry["hash"], number if entry["kind"] == 2 else 0
            names.setdefault(place, (entry | {"rank": number}, text))
    total: dict[str, Any] = {"keys": [], "names": [], "rows": [], "numbers": [], "texts": b"", "record": b""}
    for text, held in sorted(keys.items(), key=lambda item: index_bytes.hashed(item[0])):
        total["texts"] += text
        found = {"hash": index_bytes.hashed(text), "first": len(total[held["kind"]]), "count": len(held["rows"])}
        total["keys"].append(found | {"text": len(total["texts"]), "entry": held["entry"], "origins": held["origins"]})
        total[held["kind"]] += sorted(held["rows"], key=lambda row: row.get("start", []))
    for _, (entry, text) in sorted(names.items(), key=lambda item: item[0]):
        total["texts"] += text
        total["names"].append(entry | {"text": len(total["texts"])})
    places = [dict(zip(part["header"]["axes"], part["coordinates"][0], strict=True)) for part in parts]
    header = parts[0]["header"] | {"axes": axes, "entries": entries, "dimensions": dimensions}
    ranks = [part["ranks"][0] for part in parts]
    return {**total, "header": header, "ranks": ranks, "coordinates": [[p.get(a, -1) for a in axes] for p in places]}


def texts_of(part: dict[str, Any]) -> list[bytes]:
    """The texts of keys, then of names."""
    ends = [0, *(entry["text"] for entry in (*part["keys"], *part["names"]))]
    return [part["texts"][first:last] for first, last in pairwise(ends)]


def widened(row: dict[str, Any], dimensions: int) -> dict[str, Any]:
    """A row whose box has so many dimensions."""
    boxes = {name: row[name] + [0] * (dimensions - len(row[name])) for name in ("start", "extent") if name in row}
    return row | boxes


def edit(directory: Path, rank: int, change: Change) -> None:
    """Change a rank's own index, and all else so that it fits: the group's index and the manifest."""
    parts = [index_bytes.decode((directory / index(r)).read_bytes()) for r in HELD]
    change(parts[rank])
    (directory / index(rank)).write_bytes(index_bytes.encode(parts[rank]))
    replace_group(directory, index_bytes.encode(grouped(parts)))


def edit_group(directory: Path, change: Change) -> None:
    """Change the group's index, and the manifest so that it fits; ranks' own say what they said."""
    part = index_bytes.decode((directory / GROUP).read_bytes())
    change(part)
    replace_group(directory, index_bytes.encode(part))


def checksum(data: bytes) -> str:
    """As docs/format.md has it."""
    return f"xxh3_64:{index_bytes.hashed(data):016x}"


def replace_group(directory: Path, data: bytes) -> None:
    """Another group's index, with a manifest that fits it."""
    (directory / GROUP).write_bytes(data)
    metadata = read_manifest(directory)
    entry = metadata.index[0].model_copy(update={"size": len(data), "checksum": checksum(data)})
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"index": (entry,)}))


def rename(part: Part, key: str, new: str) -> None:
    """Give a rank's own key another name, and all keys and rows the order that follows from it."""
    texts = dict(zip(texts_of(part)[: len(part["keys"])], part["keys"], strict=True))
    named = texts_of(part)[len(part["keys"]) :]
    texts = {(new.encode() if text == key.encode() else text): entry for text, entry in texts.items()}
    rows, part["keys"], part["rows"], part["texts"] = part["rows"], [], [], b""
    for text, entry in sorted(texts.items(), key=lambda item: index_bytes.hashed(item[0])):
        part["texts"] += text
        found = rows[entry["first"] : entry["first"] + entry["count"]]
        if part["header"]["entries"][entry["entry"]]["kind"] == "sharded":
            entry["first"] = len(part["rows"])
            part["rows"] += found
        part["keys"].append(entry | {"hash": index_bytes.hashed(text), "text": len(part["texts"])})
    for entry, text in zip(part["names"], named, strict=True):
        part["texts"] += text
        entry["text"] = len(part["texts"])


def take_out(part: Part, key: str) -> None:
    """As if the rank had never had the key."""
    texts, entries = texts_of(part), part["header"]["entries"]
    place = texts.index(key.encode())
    gone = part["keys"].pop(place)
    kind = entries[gone["entry"]]["kind"]
    array = "rows" if kind == "sharded" else "numbers"
    del part[array][gone["first"] : gone["first"] + gone["count"]]
    for other in part["keys"]:
        if (entries[other["entry"]]["kind"] == "sharded") == (kind == "sharded") and other["first"] > gone["first"]:
            other["first"] -= gone["count"]
    for other in (*part["keys"][place:], *part["names"]):
        other["text"] -= len(texts[place])
    part["texts"] = b"".join(texts[:place] + texts[place + 1 :])


def rows_of(part: Part, key: str) -> list[Part]:
    """The rows of a sharded key, to be changed in place."""
    found = key_of(part, key)
    rows: list[Part] = part["rows"]
    return rows[found["first"] : found["first"] + found["count"]]


def key_of(part: Part, key: str) -> Part:
    """What an index has of a key, to be changed in place."""
    found: Part = part["keys"][texts_of(part).index(key.encode())]
    return found


def write_head(directory: Path, parts: list[dict[str, Any]]) -> None:
    """Write the group's index and the manifest."""
    group = directory / GROUP
    group.write_bytes(index_bytes.encode(grouped(parts)))
    entry = IndexEntry(name=GROUP, size=group.stat().st_size, checksum=file_checksum(group), rank=0)
    metadata = Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        save=SAVE,
        writer={"mbridge-fsdp-ckpt": "0"},
        topology={"world": 2, "tensor": 2},
        sections=("model", "optimizer"),
        slots=("exp_avg", "step"),
        hyperparameters={f"{SET:016x}": SETS},
        keys=len(KEYS),
        chunks=sum(map(len, HELD.values())),
        index=(entry,),
        values=encode(VALUES),
    )
    write_manifest(directory / "manifest.json", metadata)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Metadata that says of itself what it should, whatever it says of the rest."""
    path.write_bytes(manifest_bytes(manifest))

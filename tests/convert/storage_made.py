# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Small checkpoints made by hand: tilings drawn at random, and stock's own writer without a process group."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import checkpoint as dcp

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest
from mbridge_fsdp_ckpt.io.files import file_checksum
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import handmade, index_bytes

Choose = Callable[[int], int]
"""A number below another."""
_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<i2"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}


def tiles(box: Box, depth: int, choose: Choose) -> Iterator[Box]:
    """Cut a box along dimensions and at places that are chosen, again and again."""
    dims = [dim for dim, size in enumerate(box.size) if size > 1]
    if not depth or not dims:
        yield box
        return
    dim = dims[choose(len(dims))]
    at = 1 + choose(box.size[dim] - 1)
    for start, stop in ((0, at), (at, box.size[dim])):
        offset, size = list(box.offset), list(box.size)
        offset[dim], size[dim] = offset[dim] + start, stop - start
        yield from tiles(Box(tuple(offset), tuple(size)), depth - 1, choose)


def save_tiled(directory: Path, tensors: dict[str, torch.Tensor], ranks: int, depth: int, choose: Choose) -> Path:
    """Save tensors as blocks that random ranks wrote."""
    directory.mkdir(parents=True)
    held: dict[int, list[tuple[str, Box]]] = {rank: [] for rank in range(ranks)}
    for key, tensor in tensors.items():
        for box in tiles(Box((0,) * tensor.dim(), tuple(tensor.shape)), depth, choose):
            held[choose(ranks)].append((key, box))
    keys = {
        key: KeyEntry(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for key, t in tensors.items()
    }
    entries = [entry.model_dump(mode="json") for entry in keys.values()]
    parts = [_save_rank(directory, rank, blocks, tensors, entries) for rank, blocks in held.items()]
    group = directory / handmade.GROUP
    group.write_bytes(index_bytes.encode(handmade.grouped(parts)))
    entry = IndexEntry(name=group.name, size=group.stat().st_size, checksum=file_checksum(group), rank=0)
    metadata = Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        save=handmade.SAVE,
        writer={},
        topology={"world": ranks, "tensor": 2},
        sections=("model",),
        keys=len(keys),
        chunks=sum(map(len, held.values())),
        index=(entry,),
        values={"iteration": 10},
    )
    handmade.write_manifest(directory / "manifest.json", metadata)
    return directory


def _save_rank(
    directory: Path,
    rank: int,
    blocks: list[tuple[str, Box]],
    tensors: dict[str, torch.Tensor],
    entries: list[dict[str, Any]],
) -> dict[str, Any]:
    """One rank's payload and index file; returns the index, taken apart."""
    writer = PayloadWriter(directory / f"__{rank}_0.distcp")
    keys: dict[str, dict[str, Any]] = {}
    dimensions = max([1, *(tensor.dim() for tensor in tensors.values())])

    def padded(numbers: tuple[int, ...]) -> list[int]:
        return [*numbers, *[0] * (dimensions - len(numbers))]

    for key, box in blocks:
        chunk = writer.add(key, tensors[key][_index(box)].reshape(-1), box)
        row: dict[str, Any] = {"lead": chunk.lead, "offset": chunk.record.offset, "length": chunk.record.length}
        row |= {"checksum": chunk.checksum, "start": padded(box.offset), "extent": padded(box.size)}
        keys.setdefault(key, {"key": key, "entry": list(tensors).index(key), "rows": []})["rows"].append(row)
    payload = writer.close()
    found = index_bytes.own(
        rank,
        save=handmade.SAVE,
        coordinates={"rank": rank, "pipeline": 0, "tensor": rank % 2},
        payload=(payload.size, int(payload.checksum.rpartition(":")[2], 16)),
        entries=entries,
        keys=list(keys.values()),
        names=[],
        record={"values": {"rank": rank}},
    )
    found["header"]["dimensions"] = dimensions
    (directory / handmade.index(rank)).write_bytes(index_bytes.encode(found))
    return found


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))


class RawRow(NamedTuple):
    """A block, by the rules of docs/format.md alone."""

    rank: int
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    data: bytes


def _own_indexes(directory: Path) -> Iterator[dict[str, Any]]:
    return (index_bytes.decode(path.read_bytes()) for path in sorted(directory.glob("rank_*.index")))


def _keys(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The keys of an index file, each with its place and its description."""
    ends = [0, *(key["text"] for key in file["keys"])]
    for (first, last), key in zip(pairwise(ends), file["keys"], strict=True):
        yield file["texts"][first:last].decode(), key, file["header"]["entries"][key["entry"]]


def raw_rows(directory: Path) -> Iterator[RawRow]:
    """Every row of every rank's own index file with the raw bytes it points at, and every number."""
    for file in _own_indexes(directory):
        rank = file["ranks"][0]["rank"]
        path = directory / handmade.payload(rank)
        payload = path.read_bytes() if path.exists() else b""
        for key, place, entry in _keys(file):
            span = slice(place["first"], place["first"] + place["count"])
            for number in file["numbers"][span] if entry["kind"] != "sharded" else ():
                yield RawRow(rank, key, (), (), number["data"][: number["bytes"]])
            for row in file["rows"][span] if entry["kind"] == "sharded" else ():
                dimensions = len(entry["shape"])
                offset, size = tuple(row["start"][:dimensions]), tuple(row["extent"][:dimensions])
                begin = row["offset"] + row["lead"]
                yield RawRow(rank, key, offset, size, payload[begin : begin + _bytes(size, entry)])


def _bytes(size: tuple[int, ...], entry: dict[str, Any]) -> int:
    return math.prod(size) * _NUMPY[entry["dtype"]].itemsize


def raw_arrays(directory: Path) -> dict[str, Any]:
    """Every tensor put together from those bytes; each element exactly once."""
    keys = {key: entry for file in _own_indexes(directory) for key, _, entry in _keys(file)}
    found = {key: np.zeros(entry["shape"], _NUMPY[entry["dtype"]]) for key, entry in keys.items()}
    times = {key: np.zeros(entry["shape"], int) for key, entry in keys.items()}
    for row in raw_rows(directory):
        index = tuple(slice(o, o + s) for o, s in zip(row.offset, row.size, strict=True))
        found[row.key][index] = np.frombuffer(row.data, found[row.key].dtype).reshape(row.size)
        times[row.key][index] += 1
    assert all((count == 1).all() for count in times.values()), "an element lies in none or in two blocks"
    return found


def bits(tensor: torch.Tensor) -> Any:
    """A tensor as `raw_arrays` has it."""
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.contiguous().view(torch.int16).numpy() if name == "bfloat16" else tensor.numpy()


STOCK_NAME = "module.module.weight"


def save_stock(directory: Path, **more: Any) -> Path:
    """A checkpoint by torch's own writer, nested as Bridge nests it."""
    state = {
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": {"weight": torch.linspace(-1, 1, 12).reshape(4, 3), "bias": torch.arange(3)},
        "optimizer": {
            "state": {STOCK_NAME: {"exp_avg": torch.ones(4, 3), "step": torch.tensor(7.0)}},
            "param_to_group_meta": {STOCK_NAME: {"lr": 0.1, "betas": (0.9, 0.95)}},
        },
        "opt_param_scheduler": {"max_lr": 1e-4},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.arange(5, dtype=torch.uint8)}]},
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    (directory / "train_state.pt").write_bytes(torch_bytes({"step": torch.tensor(10)}))
    (directory / "run_config.yaml").write_text(CONFIG)
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return directory


CONFIG = """\
checkpoint:
  save: here  # and nowhere else
  ckpt_format: fsdp_dtensor
  custom_manager_class: null
model:
  tensor_model_parallel_size: 1
  expert_model_parallel_size: 4
ddp: {use_megatron_fsdp: true, data_parallel_sharding_strategy: optim_grads_params}
"""


def torch_bytes(value: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return open, (str(self.place), "w")


def hostile_metadata(directory: Path, place: Path) -> None:
    """Replace `.metadata` by a pickle that runs code."""
    (directory / ".metadata").write_bytes(pickle.dumps(Hostile(place)))


def flip(path: Path, position: int) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def positions(directory: Path, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Places in the middle of files."""
    for name in names:
        yield name, (directory / name).stat().st_size // 2

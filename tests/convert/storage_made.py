"""Small checkpoints made by hand: tilings drawn at random, and stock's own writer without a process group."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as dcp

from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.files import file_checksum
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.storage.format.schema import VERSION, Manifest, TableEntry, TableHeader
from mbridge_fsdp_ckpt.storage.format.table import table_bytes
from tests.unit.handmade import write_manifest

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
    entries = []
    for rank, blocks in held.items():
        writer = PayloadWriter(directory / f"__{rank}_0.distcp")
        chunks = [writer.add(k, tensors[k][_index(box)].reshape(-1), box) for k, box in blocks]
        header = TableHeader(
            rank=rank,
            coordinates={"rank": rank, "pipeline": 0, "tensor": rank % 2},
            files=(writer.close(),),
            keys={key: keys[key] for key, box in blocks if not any(box.offset)},
            values={"rank": rank},
            chunks=len(chunks),
        )
        path = directory / f"chunks_{rank:05d}.jsonl"
        path.write_bytes(table_bytes(header, chunks))
        entries.append(TableEntry(name=path.name, size=path.stat().st_size, checksum=file_checksum(path), rank=rank))
    head = Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        writer={},
        topology={"world": ranks, "tensor": 2},
        sections=("model",),
        keys=keys,
        tables=tuple(entries),
        values={"iteration": 10},
    )
    write_manifest(directory / "manifest.json", head)
    return directory


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))


def raw_rows(directory: Path) -> Iterator[tuple[int, list[Any], bytes]]:
    """Every row of every table with its rank and the raw bytes it points at: by JSON and offsets alone."""
    head = json.loads((directory / "manifest.json").read_text())
    for table in head["tables"]:
        header, *rows = [json.loads(line) for line in (directory / table["name"]).read_text().splitlines()]
        for row in rows:
            payload = (directory / header["files"][row[1]]["name"]).read_bytes()
            yield table["rank"], row, payload[row[2] : row[2] + row[3]]


def raw_arrays(directory: Path) -> dict[str, Any]:
    """Every tensor put together from those bytes; each element exactly once."""
    keys = json.loads((directory / "manifest.json").read_text())["keys"]
    found, times = {}, {}
    for key, entry in keys.items():
        found[key] = np.zeros(entry["shape"], _NUMPY[entry["dtype"]])
        times[key] = np.zeros(entry["shape"], int)
    for _, row, data in raw_rows(directory):
        key, offset, size = row[0], row[4], row[5]
        index = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        found[key][index] = np.frombuffer(data, _NUMPY[keys[key]["dtype"]]).reshape(size)
        times[key][index] += 1
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

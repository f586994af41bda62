"""A checkpoint of two ranks made by hand, file by file, without the code that saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.files import file_checksum
from mbridge_fsdp_ckpt.storage.format.manifest import manifest_bytes
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.storage.format.schema import VERSION, Manifest, ParameterGroup, TableEntry, TableHeader
from mbridge_fsdp_ckpt.storage.format.table import Row, Scalar, table_bytes
from mbridge_fsdp_ckpt.storage.format.values import encode

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


def payload(rank: int) -> str:
    """Name of a rank's payload file."""
    return f"__{rank}_0.distcp"


def table(rank: int) -> str:
    """Name of a rank's chunk table."""
    return f"chunks_{rank:05d}.jsonl"


def make(directory: Path, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Path:
    """Write the checkpoint; returns the directory."""
    directory.mkdir()
    write_head(directory, [make_rank(directory, rank, tensors) for rank in HELD])
    return directory


def make_rank(directory: Path, rank: int, tensors: Mapping[str, torch.Tensor] = TENSORS) -> TableEntry:
    """Write one rank's payload and table."""
    writer = PayloadWriter(directory / payload(rank))
    rows: list[Row] = []
    for key, box in HELD[rank]:
        part = tensors[key][box.slices_in(whole(tuple(tensors[key].shape)))].reshape(-1)
        rows.append(writer.add(key, part, box) if KEYS[key].is_sharded else Scalar(key, part.numpy().tobytes()))
    header = TableHeader(
        rank=rank,
        coordinates={"rank": rank, "pipeline": 0, "tensor": rank},
        files=(writer.close(),),
        keys={key: KEYS[key] for key, box in HELD[rank] if not any(box.offset)},
        parameter_groups=(
            ParameterGroup(parameters=(NAME,), hyperparameters={"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}),
        ),
        stateless=(f"module.module.frozen{rank}",),
        values=encode({"rng_state": {f"(0, {rank})": [{"torch_rng_state": torch.tensor([rank], dtype=torch.uint8)}]}}),
        chunks=len(rows),
    )
    path = directory / table(rank)
    path.write_bytes(table_bytes(header, rows))
    return TableEntry(name=path.name, size=path.stat().st_size, checksum=file_checksum(path), rank=rank)


def write_head(directory: Path, tables: list[TableEntry]) -> None:
    """Write the manifest."""
    head = Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        writer={"mbridge-fsdp-ckpt": "0"},
        topology={"world": 2, "tensor": 2},
        sections=("model", "optimizer"),
        keys=KEYS,
        tables=tuple(tables),
        values=encode(VALUES),
    )
    write_manifest(directory / "manifest.json", head)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """A head that says of itself what it should, whatever it says of the rest."""
    path.write_bytes(manifest_bytes(manifest))

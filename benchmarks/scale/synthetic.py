# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks without their payload: the index that so many would have written, made in one process.

Layers are cut over all ranks as Megatron-FSDP cuts them: bucket by bucket, one after the other, each bucket into as
many pieces as there are ranks, so that a tensor lies on some ranks that follow each other.

    bucket j        parameter 0 | parameter 1 | ...     each of `pieces` ranks that follow each other
    rank r          piece r of every bucket             a chunk of a weight and of two slots, and the step's number
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.coordination.protocol import children_of
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Array, Columns, key_hash
from mbridge_fsdp_ckpt.format.manifest import manifest_bytes, read_manifest
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, Files
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest, RankOwn
from mbridge_fsdp_ckpt.format.sums import sums_bytes
from mbridge_fsdp_ckpt.format.values import hash_of
from mbridge_fsdp_ckpt.format.write_results import WriteResult
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, KeyEntry, slot_key

SLOTS = ("", "exp_avg", "exp_avg_sq")
STEP = "step"
ROWS, WIDTH = 4096, 1024  # of a tensor
FILES = Files("0123456789ab")
_RECORD_BYTES = 512
_SETS: dict[str, Json] = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-8}
EXPERTS, EXPERT_PARALLEL = 512, 64
_ENTRIES = KeyEntry(dtype="float32", shape=(ROWS, WIDTH)), KeyEntry(dtype="float32", shape=(), kind="tensor")

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A job's checkpoint.

    Args:
        ranks: Ranks.
        buckets: Parameters of which a rank has a piece.
        pieces: Ranks that share a parameter.
    """

    ranks: int
    buckets: int
    pieces: int

    @classmethod
    def of(cls, ranks: int, chunks: int, keys: int = 370_000) -> Synthetic:
        """About as many keys as Qwen3.5-397B has with its optimizer, where there are enough chunks."""
        buckets, pieces = -(-chunks // len(SLOTS)), 2
        while cls(ranks, buckets, 2 * pieces).keys >= keys and 2 * pieces <= ranks:
            pieces *= 2
        return cls(ranks, buckets, pieces)

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return self.buckets * self.ranks // self.pieces

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.parameters * (len(SLOTS) + 1)

    @staticmethod
    def name(parameter: int) -> str:
        """A parameter's name."""
        layer, expert = divmod(parameter, EXPERTS)
        return f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"

    @staticmethod
    def optimizer_name(parameter: int) -> str:
        """A parameter's name in the optimizer."""
        return f"module.module.{Synthetic.name(parameter)}"

    @staticmethod
    def key(parameter: int, slot: str) -> str:
        """A key; the weight's slot is empty."""
        name = Synthetic.optimizer_name(parameter)
        return slot_key(name, slot) if slot else f"{MODEL_PREFIX}{Synthetic.name(parameter)}"

    def model(self, rank: int) -> list[int]:
        """The parameters of a rank's model: what it has pieces of, and those of the same experts."""
        same = np.arange(rank % EXPERT_PARALLEL, self.parameters, EXPERT_PARALLEL)
        return list(np.union1d(self._held(np.array([rank]))[0], same).tolist())

    def own(self, rank: int) -> dict[int, Box]:
        """The parameters of which a rank has a piece, with that."""
        parameters, piece, _ = self._held(np.array([rank]))
        height = ROWS // self.pieces
        return {int(one): Box((int(p) * height, 0), (height, WIDTH)) for one, p in zip(parameters, piece, strict=True)}

    def resharded(self, rank: int, ranks: int) -> dict[int, Box]:
        """What a rank of a job of another size has: its part of every bucket, cut at rows."""
        found: dict[int, Box] = {}
        in_bucket = self.ranks // self.pieces
        begin, end = rank * in_bucket * ROWS // ranks, (rank + 1) * in_bucket * ROWS // ranks
        for bucket in range(self.buckets):
            for number in range(begin // ROWS, -(-end // ROWS)):
                first, last = max(begin, number * ROWS) - number * ROWS, min(end, (number + 1) * ROWS) - number * ROWS
                found[bucket * in_bucket + number] = Box((first, 0), (last - first, WIDTH))
        return found

    def _held(self, ranks: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Of some ranks, bucket by bucket: parameters, which of their pieces, and the index of the rank."""
        buckets = np.arange(self.buckets)[:, None] * (self.ranks // self.pieces)
        shape = self.buckets, len(ranks)
        piece, rank = (np.broadcast_to(some, shape).ravel() for some in (ranks % self.pieces, np.arange(len(ranks))))
        return (buckets + ranks // self.pieces).ravel(), piece, rank

    def columns(self, ranks: Numbers, *, own: bool = False) -> Columns:
        """The index file of some ranks, in order; a rank's own has copies, too."""
        parameters, piece, rank = self._held(ranks)
        held, inverse = np.unique(parameters, return_inverse=True)
        first = np.bincount(inverse, piece == 0, len(held)) > 0
        counted = np.ones(len(held), dtype=bool) if own else first
        keys, texts, place = _keys(held, np.bincount(inverse), first, counted)
        key = np.concatenate([place[inverse * len(SLOTS) + slot] for slot in range(len(SLOTS))])
        names, name_texts = self._names(held[first], ranks[0] if own else None, int(keys["text"][-1]))
        numbers = np.zeros(int(counted.sum()), dtype=columns.NUMBER)
        numbers["bytes"] = _ENTRIES[1].nbytes
        return Columns(
            save=FILES.save,
            suffix="",
            axes=("rank", "tensor", "pipeline", "data"),
            entries=_ENTRIES,
            ranks=np.array([(rank, self._payload, rank) for rank in ranks], dtype=columns.RANK),
            coordinates=np.array([(rank, 0, 0, rank) for rank in ranks], dtype=columns.COORDINATE),
            keys=keys,
            names=names,
            numbers=numbers,
            texts=b"".join((*texts, *name_texts)),
            rows=self._rows(key, np.tile(piece, len(SLOTS)), np.tile(rank, len(SLOTS))),
            record=RankOwn(values={"rng_state": "x" * _RECORD_BYTES}).model_dump_json().encode() if own else b"",
        )

    @property
    def _record(self) -> int:
        elements = ROWS // self.pieces * WIDTH * 4
        return elements + 800 + sums_bytes(elements)

    @property
    def _payload(self) -> int:
        return self.buckets * len(SLOTS) * self._record

    def _rows(self, key: Numbers, piece: Numbers, rank: Numbers) -> Array:
        rows = np.zeros(len(key), dtype=columns.row_dtype(2))
        order = np.lexsort((piece, key))
        rows["rank"], rows["lead"], rows["length"] = rank[order], 400, self._record
        rows["offset"] = order * self._record % self._payload
        rows["checksum"] = order
        rows["start"][:, 0] = piece[order] * (ROWS // self.pieces)
        rows["extent"] = ROWS // self.pieces, WIDTH
        return rows

    def _names(self, first: Numbers, rank: int | None, base: int) -> tuple[Array, list[bytes]]:
        """Parameters whose first element is there, and in a rank's own index file the param group of its model."""
        texts = [self.optimizer_name(int(number)).encode() for number in first]
        if rank is not None:
            texts.append(columns.param_group_name(map(self.optimizer_name, self.model(rank))).encode())
        names = np.zeros(len(texts), dtype=columns.NAME)
        names["kind"][len(first) :] = columns.PARAM_GROUP
        names["hash"], names["value"] = [key_hash(text) for text in texts], np.uint64(hash_of(dict(_SETS)))
        order = np.lexsort((names["hash"], names["kind"]))
        names, ordered = names[order], [texts[number] for number in order]
        names["text"] = base + np.cumsum([len(text) for text in ordered])
        return names, ordered

    def groups(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The groups, each with its leader: see docs/format.md."""
        alone, children = [0], children_of(0, self.ranks)
        for leader in children:
            below = [leader]
            for member in below:
                below += children_of(member, self.ranks)
            if len(below) == 1:
                alone.append(leader)
            else:
                yield leader, np.array(sorted(below))
        yield 0, np.array(alone)

    def write(self, directory: Path, own: tuple[int, ...]) -> None:
        """Write the checkpoint with the index files of some ranks, and payload files without content for all."""
        directory.mkdir(parents=True)
        entries = []
        for leader, ranks in self.groups():
            data = self.columns(ranks).to_bytes()
            path = directory / FILES.of_group(leader)
            path.write_bytes(data)
            entries.append(IndexEntry(rank=leader, name=path.name, size=len(data), checksum=checksum(data)))
        for rank in range(self.ranks):
            with (directory / FILES.payload(rank)).open("wb") as file:
                file.truncate(self._payload)
        for rank in own:
            (directory / FILES.of_rank(rank)).write_bytes(self.columns(np.array([rank]), own=True).to_bytes())
        (directory / "manifest.json").write_bytes(manifest_bytes(self._head(entries)))

    def _head(self, entries: list[IndexEntry]) -> Manifest:
        return Manifest(
            format=FORMAT_NAME,
            version=VERSION,
            save=FILES.save,
            writer={},
            topology={"world": self.ranks},
            sections=("model", "optimizer"),
            slots=(*SLOTS[1:], STEP),
            hyperparameters={f"{hash_of(dict(_SETS)):016x}": dict(_SETS)},
            keys=self.keys,
            chunks=self.ranks * self.buckets * len(SLOTS) + self.parameters,
            index=tuple(sorted(entries, key=lambda entry: entry.rank)),
            values={},
        )


def _keys(
    held: Numbers, count: Numbers, first: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_]
) -> tuple[Array, list[bytes], Numbers]:
    """Keys of parameters and their texts, by hash, and where each sharded one is among them: parameter by parameter.

    Args:
        held: The parameters.
        count: Chunks of each of their sharded keys.
        first: Whether the parameter's first element is among them.
        counted: Whether there is a number of it.
    """
    numbered = held[counted]
    texts = [Synthetic.key(int(one), slot).encode() for one in held for slot in SLOTS]
    texts += [Synthetic.key(int(one), STEP).encode() for one in numbered]
    hashes = np.array([key_hash(text) for text in texts], dtype=np.uint64)
    order = np.argsort(hashes)
    keys = np.zeros(len(texts), dtype=columns.KEY)
    sharded = len(held) * len(SLOTS)
    keys["entry"][sharded:] = 1
    keys["count"] = np.concatenate((np.repeat(count, len(SLOTS)), np.ones(len(numbered), dtype=np.int64)))
    keys["origins"] = np.concatenate((np.repeat(first, len(SLOTS)), first[counted]))
    keys["hash"] = hashes
    keys, ordered = keys[order], [texts[number] for number in order]
    keys["text"] = np.cumsum([len(text) for text in ordered])
    for entry in (0, 1):
        of_kind = keys["entry"] == entry
        keys["first"][of_kind] = np.cumsum(keys["count"][of_kind]) - keys["count"][of_kind]
    place = np.empty(len(texts), dtype=np.int64)
    place[order] = np.arange(len(texts))
    return keys, ordered, place[:sharded]


def result_of(directory: Path) -> WriteResult:
    """What the leaders of all groups have told of a checkpoint that is there."""
    metadata = read_manifest(directory)
    return {
        "pending": [],
        "index": [entry.model_dump() for entry in metadata.index],
        "chunks": metadata.chunks,
        "bytes": 0,
        "states": 0,
        "families": {},
        "slots": list(metadata.slots),
        "hyperparameters": dict(metadata.hyperparameters),
    }

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Stock checkpoints of released Megatron-Core name some parameters as this format does not; see `families.naming`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from mbridge_fsdp_ckpt.format.source import CheckpointSource, RankRecord, StoredChunk
from mbridge_fsdp_ckpt.io.ranges import Place, Scratch
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan

_OLD, _NEW = ".mtp_model_layer.", ".transformer_layer."


def under_new_names(source: CheckpointSource, plans: Iterable[ParameterPlan]) -> CheckpointSource:
    """The checkpoint with keys of multi-token prediction renamed, unless the model has the older names itself.

    Megatron-Core 0.19 saves `mtp.layers.0.mtp_model_layer.*` in `fsdp_dtensor`; in `torch_dist`, and in newer
    releases, it is `transformer_layer` (Megatron-LM pull request 6271).  Only hybrid models keep the older name.
    """
    names = [plan.layout.key for plan in plans]
    if any(_OLD in name for name in names) or not any(_NEW in name for name in names):
        return source
    return _Renamed(source)


class _Keys(Mapping[str, KeyEntry]):
    """Keys by their new names; what was saved under a new name counts for more."""

    def __init__(self, keys: Mapping[str, KeyEntry]) -> None:
        self._keys = keys

    def saved_as(self, key: str) -> str:
        """The name that a key was saved under."""
        return key if key in self._keys else key.replace(_NEW, _OLD)

    def __getitem__(self, key: str) -> KeyEntry:
        if _OLD in key:
            raise KeyError(key)
        return self._keys[self.saved_as(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key.replace(_OLD, _NEW) for key in self._keys))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Renamed:
    """See `CheckpointSource`.

    Args:
        source: The checkpoint.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._keys = _Keys(source.metadata.keys)
        self.metadata = replace(source.metadata, keys=self._keys)

    def look_near(self, ranks: Iterable[int]) -> None:
        """See `CheckpointSource`."""
        self._source.look_near(ranks)

    def chunks(
        self, keys: Iterable[str], needed: Mapping[str, Sequence[Box]] | None = None
    ) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        saved_as = {key: self._keys.saved_as(key) for key in keys}
        wanted = None if needed is None else {old: needed.get(key, ()) for key, old in saved_as.items()}
        found = self._source.chunks(saved_as.values(), wanted)
        return {key: [replace(chunk, key=key) for chunk in found[old]] for key, old in saved_as.items()}

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """See `CheckpointSource`."""
        return self._source.read(self._as_saved(chunk), verify=verify, scratch=scratch)

    def read_rows(
        self, chunk: StoredChunk, scratch: Scratch, *, verify: bool = True
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `CheckpointSource`."""
        return self._source.read_rows(self._as_saved(chunk), scratch, verify=verify)

    def read_part(self, chunk: StoredChunk, place: Place, scratch: Scratch, *, verify: bool = True) -> None:
        """See `CheckpointSource`."""
        self._source.read_part(self._as_saved(chunk), place, scratch, verify=verify)

    def reading_ahead(self, chunks: Iterable[StoredChunk]) -> AbstractContextManager[None]:
        """See `CheckpointSource`."""
        return self._source.reading_ahead(map(self._as_saved, chunks))

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """See `CheckpointSource`."""
        self._source.verify(self._as_saved(chunk), scratch)

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`; what was saved under a new name counts for more."""
        wanted = None if names is None else set(names)
        found = self._source.hyperparameters(wanted)
        if wanted is not None and found.keys() != wanted:
            found |= self._source.hyperparameters(name.replace(_NEW, _OLD) for name in wanted - found.keys())
        older = {name: values for name, values in found.items() if _OLD in name}
        newer = {name: values for name, values in found.items() if _OLD not in name}
        return {name.replace(_OLD, _NEW): values for name, values in older.items()} | newer

    def slots(self, name: str) -> dict[str, KeyEntry]:
        """See `CheckpointSource`; what was saved under a new name counts for more."""
        return self._source.slots(name) or self._source.slots(name.replace(_NEW, _OLD))

    def stateless(self, names: Iterable[str]) -> set[str]:
        """See `CheckpointSource`."""
        asked = {both for name in names for both in (name, name.replace(_NEW, _OLD))}
        return {name.replace(_OLD, _NEW) for name in self._source.stateless(asked)}

    def share(self, index: int, count: int) -> Sequence[str]:
        """See `CheckpointSource`."""
        return [key.replace(_OLD, _NEW) for key in self._source.share(index, count)]

    def ranks(self) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        for record in self._source.ranks():
            yield replace(record, stateless=tuple(name.replace(_OLD, _NEW) for name in record.stateless))

    def near(self, place: Mapping[str, int]) -> tuple[RankRecord | None, RankRecord | None]:
        """See `CheckpointSource`."""
        return self._source.near(place)

    def states(self, modules: Iterable[str]) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        return self._source.states(modules)

    def _as_saved(self, chunk: StoredChunk) -> StoredChunk:
        return replace(chunk, key=self._keys.saved_as(chunk.key))

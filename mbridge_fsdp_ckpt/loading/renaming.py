"""Stock checkpoints of released Megatron-Core name some parameters as this format does not; see `families.naming`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from mbridge_fsdp_ckpt.plan.pieces import ParameterPlan
from mbridge_fsdp_ckpt.storage.ranges import Scratch
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, RankRecord, StoredChunk

_OLD, _NEW = ".mtp_model_layer.", ".transformer_layer."


def under_new_names(source: CheckpointSource, plans: Iterable[ParameterPlan]) -> CheckpointSource:
    """The checkpoint with keys of multi-token prediction renamed, unless the model has the older names itself.

    Megatron-Core 0.19 saves `mtp.layers.0.mtp_model_layer.*` in `fsdp_dtensor`; in `torch_dist`, and in newer
    releases, it is `transformer_layer` (Megatron-LM pull request 6271).  Only hybrid models keep the older name.
    """
    old_of = {key.replace(_OLD, _NEW): key for key in source.head.keys if _OLD in key}
    if not old_of or any(_OLD in plan.layout.key for plan in plans):
        return source
    return _Renamed(source, old_of)


class _Renamed:
    """See `CheckpointSource`.

    Args:
        source: The checkpoint.
        old_of: Its own key by new key.
    """

    def __init__(self, source: CheckpointSource, old_of: Mapping[str, str]) -> None:
        self._source, self._old_of = source, old_of
        keys = source.head.keys
        hidden = set(old_of.values())
        kept = {key: entry for key, entry in keys.items() if key not in hidden}
        self.head = replace(source.head, keys={**kept, **{new: keys[old] for new, old in old_of.items()}})

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        wanted = list(keys)
        found = self._source.chunks([self._old(key) for key in wanted])
        return {key: [replace(chunk, key=key) for chunk in found[self._old(key)]] for key in wanted}

    def read(self, chunk: StoredChunk, *, verify: bool = True, scratch: Scratch | None = None) -> torch.Tensor:
        """See `CheckpointSource`."""
        return self._source.read(replace(chunk, key=self._old(chunk.key)), verify=verify, scratch=scratch)

    def verify(self, chunk: StoredChunk, scratch: Scratch) -> None:
        """See `CheckpointSource`."""
        self._source.verify(replace(chunk, key=self._old(chunk.key)), scratch)

    def hyperparameters(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource`; what was saved under a new name counts for more."""
        asked = None if names is None else {both for name in names for both in (name, name.replace(_NEW, _OLD))}
        found = self._source.hyperparameters(asked)
        older = {name: values for name, values in found.items() if _OLD in name}
        newer = {name: values for name, values in found.items() if _OLD not in name}
        return {name.replace(_OLD, _NEW): values for name, values in older.items()} | newer

    def ranks(self) -> Iterator[RankRecord]:
        """See `CheckpointSource`."""
        for record in self._source.ranks():
            yield replace(record, stateless=tuple(name.replace(_OLD, _NEW) for name in record.stateless))

    def _old(self, key: str) -> str:
        return self._old_of.get(key, key)

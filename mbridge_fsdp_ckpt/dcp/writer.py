# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What stock needs to read a checkpoint of this format: `.metadata`, and its non-tensor values as stock pickles.

Made from the index in the directory, at commit or at any time later; this package never reads either.
Numbers that stand in the index get their records among the values.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import _nested_dict

from mbridge_fsdp_ckpt.dcp.metadata import KeyPath, Leaf, Record, Sharded, Values, metadata_bytes, path_of
from mbridge_fsdp_ckpt.format.names import (
    ARGUMENTS,
    DCP_METADATA,
    KEPT_ARGUMENTS,
    OPTIMIZER,
    PARAM_GROUPS,
    payload_name,
)
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.io.files import replace_file
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name

_CONSUMED = KEPT_ARGUMENTS[0]
_HYPERPARAMETERS = OPTIMIZER, "param_to_group_meta"
"""Where stock nests them, by parameter; of a torch optimizer, they are among the values, by param group."""


def write_dcp_view(
    directory: AnyPath,
    source: SafeSource,
    values: Mapping[str, Any],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write `.metadata` and the values file.

    Args:
        directory: Where to write them.
        source: The checkpoint.
        values: Non-tensor state of all ranks, nested as stock nests it.
        progress: Called after each index file.

    Raises:
        ManifestError: The index contradicts itself; nothing was written.
        UnsupportedStateError: Two values have one key.
        OSError: The storage refused.
    """
    sharded: list[Sharded] = []
    numbers: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    merged: dict[str, Any] = dict(values)
    for group in source.index.groups:
        payload = [source.files.payload(rank) for rank in group.ranks["rank"].tolist()]
        sharded.append(Sharded.of(group, payload))
        for place, _, number in group.all_numbers():
            numbers[group.entry(place).dtype, number].append(group.text_of_key(place))
        progress()
    for record in source.ranks():
        states = record.values.get("rng_state")
        if isinstance(states, Mapping):  # by place, as stock has it; a caller of `save` may have another
            merged["rng_state"] = {**states, **merged.get("rng_state", {})}
        progress()
    arguments = merged.get(ARGUMENTS)
    if isinstance(arguments, Mapping) and _CONSUMED in arguments and all(isinstance(name, str) for name in arguments):
        merged[ARGUMENTS] = Namespace(**arguments)  # as Megatron-LM, which looks for its own, wants them
    lists_groups = PARAM_GROUPS in merged.get(OPTIMIZER, ())
    groups = [] if lists_groups else list(_hyperparameters(source))
    if groups:
        merged.pop(OPTIMIZER, None)
    file = _ValuesFile(directory / payload_name(0, source.files.suffix, file=1))
    found = [file.number(dtype, data, keys) for (dtype, data), keys in numbers.items()]
    found += [Values(((),), file.leaves(merged)), *(Values(parents, file.leaves(own)) for parents, own in groups)]
    file.close()
    replace_file(directory / DCP_METADATA, metadata_bytes(sharded, found))


def _hyperparameters(source: SafeSource) -> Iterator[tuple[tuple[KeyPath, ...], dict[str, Any]]]:
    """Hyperparameters, each once, with where stock nests them: below every parameter that has them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, hashed in source.parameters().items():
        names[hashed].append(name)
    for alike in names.values():
        own = source.hyperparameters(alike[:1])[alike[0]]
        yield tuple((*_HYPERPARAMETERS, name) for name in alike), own


class _ValuesFile:
    """The file of what is not sharded: equal numbers and equal pickles are written once.

    Args:
        path: The file.
    """

    def __init__(self, path: AnyPath) -> None:
        self._writer, self._name = PayloadWriter(path), path.name
        self._by_value: dict[int, tuple[Any, Record]] = {}  # with the value: nobody else gets its id
        self._by_pickle: dict[bytes, Record] = {}

    def number(self, name: str, data: bytes, keys: list[str]) -> Values:
        """Keys of equal numbers of a dtype."""
        dtype = dtype_from_name(name)
        chunk = self._writer.add(keys[0], torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype), whole(()))
        return Values(tuple(map(path_of, keys)), (Leaf((), Record(self._name, *chunk.record), dtype),))

    def leaves(self, values: Mapping[str, Any]) -> tuple[Leaf, ...]:
        """Nested values, flat as stock has them: tensors become chunks, the rest pickles."""
        flat, paths = _nested_dict.flatten_state_dict(dict(values))
        return tuple(self._leaf(key, paths[key], value) for key, value in flat.items())

    def _leaf(self, key: str, path: KeyPath, value: Any) -> Leaf:
        if not isinstance(value, torch.Tensor):
            return Leaf(path, self._pickled(value))
        shape = tuple(value.shape)
        chunk = self._writer.add(key, value.reshape(-1), whole(shape))
        return Leaf(path, Record(self._name, *chunk.record), value.dtype, shape)

    def _pickled(self, value: Any) -> Record:
        """A value's pickle; a value that many have is pickled once."""
        if id(value) in self._by_value:
            return self._by_value[id(value)][1]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        if data not in self._by_pickle:
            self._by_pickle[data] = Record(self._name, self._writer.position, len(data))
            self._writer.append(data)
        self._by_value[id(value)] = value, self._by_pickle[data]
        return self._by_pickle[data]

    def close(self) -> None:
        """Flush it to disk.

        Raises:
            OSError: The storage refused.
        """
        self._writer.close()

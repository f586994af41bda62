# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's `torch_dist` checkpoints in this format's terms: weights, and optimizer state where it goes by parameter.

The model is built from the checkpoint's run configuration, or from Megatron-LM's arguments, in one process, unsharded
and without memory for its parameters.  Megatron-Core says where `torch_dist` has each of them (`sharded_state_dict`),
this package's plan where they belong here.  Tensors are then copied from directory to directory.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import torch

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import KeyMismatchError
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.integrations.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.integrations.bridge.plain_model import PlainModel
from mbridge_fsdp_ckpt.integrations.bridge.process_group import process_group_for_conversion
from mbridge_fsdp_ckpt.live.local_shards import LocalShard, model_shards
from mbridge_fsdp_ckpt.live.planned import Planned, plan_model
from mbridge_fsdp_ckpt.live.tensors import local_shard, storage_of
from mbridge_fsdp_ckpt.loading.match import listed
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.convert.description import Description, Parameters
from mbridge_fsdp_ckpt.tools.convert.from_stock import note_of_arguments, topology_of
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import Common, read_random_states
from mbridge_fsdp_ckpt.tools.convert.torch_dist.links import Link, Part, block_of, links, parts_of
from mbridge_fsdp_ckpt.tools.convert.torch_dist.reader import LinkedChunks
from mbridge_fsdp_ckpt.tools.convert.torch_dist.unsharded import UnshardedModel, hyperparameters_of
from mbridge_fsdp_ckpt.versions import require, writer_versions

_SLOT = re.compile(r"(?:.+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MAIN_WEIGHTS = ("param", "fp32_param")


def describe_torch_dist(
    source: DcpSource, common: Common, *, trust_run_config: bool
) -> tuple[LinkedChunks, Description]:
    """Where every tensor lies under this format's keys, and all that the checkpoint says besides.

    Args:
        source: The checkpoint.
        common: Its non-tensor state.
        trust_run_config: Whether Bridge may build the model from the run configuration, which can name any code.

    Raises:
        ConfigurationError: It may not, or cannot.
        KeyMismatchError: The checkpoint is not of that model.
        UnsupportedStateError: Megatron saves a parameter otherwise than as blocks.
    """
    require("save and load", "conversion", "torch_dist")
    with _quiet(), process_group_for_conversion():
        model = UnshardedModel.of(source.metadata.directory, common.arguments, trusted=trust_run_config)
        planned = plan_model(PlainModel(model.module))
        parts = _described(model.module, planned, common, source.tensors)
        tensors = {id(item.plan): local_shard(item.tensor) for item in planned}
        slots, parameters, trouble = _slots(source.tensors), Parameters(), common.no_optimizer
        if not trouble:
            trouble = _unlike(planned, parts, slots, source.tensors)
        if not trouble:
            parameters, trouble = hyperparameters_of(model, planned, common)
        mapping = _Mapping(source, {} if trouble else slots)
        for shard in model_shards(planned, vocabulary_size=model.vocabulary_size):
            mapping.add(shard, tensors[id(shard.plan)], parts[id(shard.plan)])
    records, notes = read_random_states(source)
    if common.left_out:
        notes.append(f"left out, being no plain data: {', '.join(common.left_out)}")
    notes += note_of_arguments(common.values)
    if trouble:
        notes.append(trouble)
    description = Description(
        keys=mapping.keys,
        sections=("model",) if trouble else ("model", "optimizer"),
        topology=topology_of(source.metadata.directory, [*records.values()]),
        values=encode_mapping(common.values, "values"),
        records=records,
        parameters=Parameters() if trouble else parameters,
        writer=writer_versions(training=False),
        notes=tuple(notes),
    )
    return LinkedChunks(source, mapping.links), description


@contextmanager
def _quiet() -> Iterator[None]:
    """What Megatron and its companions print, log and warn of concerns training."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _described(
    module: Any, planned: Sequence[Planned], common: Common, stored: Mapping[str, KeyEntry]
) -> dict[int, list[Part]]:
    """Megatron's parts of every parameter, by the identity of its plan.

    Raises:
        KeyMismatchError: The checkpoint lacks some, has others, or has them in another shape.
    """
    names = {storage_of(tensor): name for name, tensor in module.state_dict(keep_vars=True).items() if _counts(tensor)}
    by_storage: dict[int, list[Any]] = defaultdict(list)
    for described in _sharded_tensors(module, common, stored):
        by_storage[storage_of(described.data)].append(described)
    found, missing, unlike = dict[int, list[Part]](), list[str](), list[str]()
    for item in planned:
        tensor = local_shard(item.tensor)
        name = names.get(storage_of(tensor), item.plan.layout.key)
        found[id(item.plan)] = parts_of(tensor, by_storage[storage_of(tensor)], name)
        for part in found[id(item.plan)]:
            entry = stored.get(part.key)
            if entry is None:
                missing.append(part.key)
            elif entry.shape != part.shape and not _is_padding(part, entry):
                unlike.append(f"{part.key}: shape {list(entry.shape)} in the checkpoint, {list(part.shape)} expected")
        if not found[id(item.plan)]:
            missing.append(name)
    expected = {part.key for parts in found.values() for part in parts}
    others = [key for key in stored if key not in expected and ".optimizer." not in f".{key}"]
    _refuse(missing, unlike, others, stored)
    return found


def _sharded_tensors(module: Any, common: Common, stored: Mapping[str, KeyEntry]) -> list[Any]:
    """Megatron's description of the model, of the variant that was saved: layers stacked, or one by one."""
    found = _flat(module.sharded_state_dict(metadata=dict(common.content)))
    if all(tensor.key in stored for tensor in found):
        return found
    other = _flat(module.sharded_state_dict(metadata={**common.content, "non_homogeneous_layers": True}))
    return min(found, other, key=lambda tensors: sum(tensor.key not in stored for tensor in tensors))


def _flat(state: Any) -> list[Any]:
    """All sharded tensors, those of factories made."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = []
    for value in nested_values(state):
        built = value.build() if isinstance(value, ShardedTensorFactory) else value
        inner = nested_values(built) if isinstance(built, dict | list) else [built]
        found += [tensor for tensor in inner if isinstance(tensor, ShardedTensor)]
    return found


def _refuse(missing: list[str], unlike: list[str], others: list[str], stored: Mapping[str, KeyEntry]) -> None:
    found = [
        text
        for names, text in (
            (missing, f"{len(missing)} missing: {listed(missing, stored)}"),
            (unlike, f"{len(unlike)} unlike: {listed(unlike)}"),
            (others, f"{len(others)} unexpected: {listed(others)}"),
        )
        if names
    ]
    if found:
        raise KeyMismatchError(
            expected=f"the tensors of the model that {RUN_CONFIG}, or Megatron-LM's arguments, describe",
            found="; ".join(found),
            remedy="Nothing was written. Adapters alone, and models changed after the run, cannot be converted.",
        )


def _is_padding(part: Part, entry: KeyEntry) -> bool:
    return part.padded and entry.shape[1:] == part.shape[1:] and entry.shape[0] >= part.shape[0]


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _slots(stored: Mapping[str, KeyEntry]) -> dict[str, dict[str, str]]:
    """Keys of optimizer state by parameter's key and slot."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for key in stored:
        match = _SLOT.fullmatch(key)
        if match:
            found[match[2]][match[1]] = key
    return dict(found)


def _unlike(
    planned: Iterable[Planned],
    parts: Mapping[int, Sequence[Part]],
    slots: Mapping[str, Mapping[str, str]],
    stored: Mapping[str, KeyEntry],
) -> str:
    """Why optimizer state cannot be converted; empty where it can."""
    for item in planned:
        if not item.plan.layout.optimizer_name:
            continue  # a buffer
        for part in parts[id(item.plan)]:
            keys = slots.get(part.key, {})
            if not keys.keys() & set(_MAIN_WEIGHTS) or keys.keys() <= set(_MAIN_WEIGHTS):
                return f"optimizer state is left out: {part.key} has none"
            if any(stored[key].shape != stored[part.key].shape for key in keys.values()):
                return f"optimizer state is left out: that of {part.key} has another shape than the parameter"
    return ""


class _Mapping:
    """Keys of this format with their links.

    Args:
        source: The checkpoint.
        slots: Its keys of optimizer state by parameter's key and slot; empty where only weights are wanted.
    """

    def __init__(self, source: DcpSource, slots: Mapping[str, Mapping[str, str]]) -> None:
        self._stored, self._slots = source.tensors, slots
        self.keys: dict[str, KeyEntry] = {}
        self.links: dict[str, list[Link]] = defaultdict(list)

    def add(self, shard: LocalShard, parameter: torch.Tensor, parts: Sequence[Part]) -> None:
        """Add a block of a parameter: the weight, and its optimizer state."""
        main, trained = shard.key, bool(shard.plan.layout.optimizer_name)
        slice_ = shard.slice_
        block = block_of(slice_.block(parameter.reshape(-1)), parameter, main)
        for link in links(block, slice_.box, parts):
            slots = self._slots.get(link.key, {}) if trained else {}
            weights = next((slots[name] for name in _MAIN_WEIGHTS if name in slots), link.key)
            self._add(main, shard.entry, link, weights)
            for slot, key in slots.items():
                if slot not in _MAIN_WEIGHTS:
                    self._add(shard.plan.slot_key(slice_.component, slot), shard.entry, link, key)

    def _add(self, key: str, entry: KeyEntry, link: Link, stored: str) -> None:
        self.keys[key] = entry.model_copy(update={"dtype": self._stored[stored].dtype})
        self.links[key].append(replace(link, key=stored))

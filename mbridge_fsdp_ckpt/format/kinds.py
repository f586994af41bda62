# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a directory holds: the kinds, and the rules by names of files and by keys.

`.metadata` alone says little: every checkpoint of torch's Distributed Checkpoint has one.  Its keys tell whose it is.
`opening.kind_of` applies these rules to a directory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum

from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    FORMAT_NAME,
    MANIFEST_NAME,
    STOCK_FORMAT,
    TORCH_DIST_METADATA,
    TRACKER,
    iteration_of,
)

TORCH_DIST_COMMON = "common.pt"
"""Non-tensor state of `torch_dist` checkpoints."""


class DirectoryKind(StrEnum):
    """What a directory holds."""

    SAFE = FORMAT_NAME
    STOCK = STOCK_FORMAT
    TORCH_DIST = "torch_dist"
    DCP = "torch.distributed.checkpoint"
    LEGACY = "torch"
    VERL_SHARDS = "VeRL's shards"
    VERL_STEP = "a step of VeRL"
    ROOT = "a root"
    HUGGING_FACE = "Hugging Face"
    OTHER = "another"


DESCRIPTIONS = {
    DirectoryKind.SAFE: f"a checkpoint in the format {FORMAT_NAME}",
    DirectoryKind.STOCK: f"a checkpoint of stock {STOCK_FORMAT}",
    DirectoryKind.TORCH_DIST: "a checkpoint in Megatron's format torch_dist",
    DirectoryKind.DCP: "a plain checkpoint of torch.distributed.checkpoint, without Megatron's keys",
    DirectoryKind.LEGACY: "a checkpoint in Megatron's legacy format torch (mp_rank_*)",
    DirectoryKind.VERL_SHARDS: "a checkpoint of VeRL's FSDP workers (model_world_size_*_rank_*.pt)",
    DirectoryKind.VERL_STEP: "a step of VeRL, with its checkpoint further down",
    DirectoryKind.ROOT: "a root of checkpoints",
    DirectoryKind.HUGGING_FACE: "a Hugging Face model",
}
"""Each kind in words; a directory of none of them is described by its entries."""

_STOCK_KEY = re.compile(r"model\.|optimizer\.(?:state|param_to_group_meta)\.|rng_state\.\(")
_FOREIGN_KEY = re.compile(r"optimizer\.param_groups\b|optim\.")
_TORCH_DIST_KEY = re.compile(r"common_state/|.*/shard_\d+")
_SHARDS = re.compile(r"(?:model|optim)_world_size_\d+_rank_\d+\.pt")
_STEP = re.compile(r"global_step_\d+")
_LEGACY = re.compile(r"mp_rank_\d+(?:_\d+)*")


def kind_by_keys(keys: Iterable[str]) -> DirectoryKind:
    """Whose checkpoint `.metadata` belongs to, by the keys in it.

    What torch's own helpers save beside `model.` and `optimizer.` has param groups of a torch optimizer, which stock
    never has.  A model without them, and nothing else, looks like stock's.
    """
    known = list(keys)
    if any(map(_TORCH_DIST_KEY.match, known)):
        return DirectoryKind.TORCH_DIST
    is_stock = any(map(_STOCK_KEY.match, known)) and not any(map(_FOREIGN_KEY.match, known))
    return DirectoryKind.STOCK if is_stock else DirectoryKind.DCP


def is_torch_dist(names: Collection[str]) -> bool:
    """Whether the files of a directory are those of `torch_dist`, or of another of Megatron's formats like it."""
    return TORCH_DIST_METADATA in names and MANIFEST_NAME not in names


def is_hugging_face(names: Collection[str]) -> bool:
    """Whether the files of a directory are those of a Hugging Face model."""
    return "config.json" in names or any(name.endswith(".safetensors") for name in names)


def kind_by_names(names: Collection[str]) -> DirectoryKind:
    """What a directory without metadata holds, by the names of its entries."""
    if is_torch_dist(names) or (TORCH_DIST_COMMON in names and DCP_METADATA not in names):
        return DirectoryKind.TORCH_DIST
    if any(map(_SHARDS.fullmatch, names)):
        return DirectoryKind.VERL_SHARDS
    if {"dist_ckpt", "transformer_config.json", "actor", "critic"} & set(names):
        return DirectoryKind.VERL_STEP
    if any(map(_LEGACY.fullmatch, names)):
        return DirectoryKind.LEGACY
    if TRACKER in names or any(iteration_of(name) is not None or _STEP.fullmatch(name) for name in names):
        return DirectoryKind.ROOT
    if is_hugging_face(names):
        return DirectoryKind.HUGGING_FACE
    return DirectoryKind.OTHER

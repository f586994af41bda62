# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The files that Bridge expects beside the tensors, and its trackers, which name the last checkpoint."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training import checkpointing as stock
from megatron.bridge.training.utils import checkpoint_utils as names
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.bridge.utils.yaml_utils import safe_yaml_representers
from megatron.training.config.container import ConfigContainerBase

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.store import AnyPath

_yaml: Any = import_module("yaml")  # it brings no types
_FAST = _yaml.CSafeDumper if _yaml.__with_libyaml__ else _yaml.SafeDumper  # the first is eight times as fast
_DUMPER: Any = type("_OfNodes", (_FAST,), {})  # nodes among the values are written as they are
_DUMPER.add_multi_representer(_yaml.Node, lambda _, node: node)
_UNCHANGING = frozenset({type(None), bool, int, float, str})
_OWN_WAYS = ("as_dict", "to_cfg_dict", "to_dict")
"""Methods of what tells Bridge itself how it is written."""


def run_files(cfg: Any, train_state: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    """Rank 0: writes the files that Bridge expects in an iteration directory, part of the same commit.

    They are as of now, whenever it is called: training changes its configuration, and Bridge's way to look at one is
    not made for two threads.  Dictionaries and text, most of the work, are made when they are written: training need
    not wait for that.
    """
    looked = Outcome.of(lambda: _looked_at(cfg) if get_rank_safe() == 0 else None, get_rank_safe(), "writing run files")
    return lambda staging: _write_run_files(staging, cfg, train_state, looked)


def _write_run_files(staging: Path, cfg: Any, train_state: dict[str, torch.Tensor], looked: Outcome[Any]) -> None:
    if isinstance(looked.brought, CheckpointError):
        raise looked.brought
    config = _yaml.dump(looked.brought.to_dict(), Dumper=_DUMPER, encoding="utf-8", default_flow_style=False)
    (staging / Path(names.get_checkpoint_train_state_filename("")).name).write_bytes(_torch_bytes(train_state))
    (staging / Path(names.get_checkpoint_run_config_filename("")).name).write_bytes(config)
    tokenizer = getattr(cfg.dataset, "tokenizer", None) if cfg.dataset else None
    if cfg.checkpoint.save_tokenizer_assets and tokenizer is not None:
        stock.save_tokenizer_assets(tokenizer, cfg.tokenizer, str(staging))


def write_trackers(root: AnyPath, step: int, train_state: dict[str, torch.Tensor]) -> None:
    """Rank 0, after the commit and before the other ranks go on: let Bridge's trackers name the checkpoint."""
    trackers.publish(root, step, _torch_bytes(train_state))


def _looked_at(cfg: Any) -> Any:
    """A configuration of which Bridge's `to_dict` gives what its `to_yaml` would write now.

    See `megatron/training/config/container.py`: copying the fields takes a fraction of the time of `to_dict`.
    """
    with safe_yaml_representers():
        node = _yaml.SafeDumper(io.StringIO(), default_flow_style=False).represent_data

        def other(value: Any) -> Any:
            if type(value) is torch.dtype:
                return _of_dtype(value, node)
            if _is_read_field_by_field(value):
                return _with_fields(value, other)
            return _copied(cfg._convert_value_to_dict(value), node)

        return other(cfg)


_dtypes: dict[torch.dtype, Any] = {}


def _of_dtype(dtype: torch.dtype, node: Callable[[Any], Any]) -> Any:
    """What Bridge writes of a dtype, as a mapping of its own: a configuration has dozens, and Bridge asks each much."""
    if dtype not in _dtypes:
        _dtypes[dtype] = _yaml.constructor.SafeConstructor().construct_document(node(dtype))
    return copy.copy(_dtypes[dtype])


def _copied(value: Any, other: Callable[[Any], Any]) -> Any:
    """Containers, copied, of values that do not change; of all others, what `other` makes of them."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {name: _copied(part, other) for name, part in value.items()}
    if kind in (list, tuple):
        return [_copied(part, other) for part in value]
    return other(value)


def _is_read_field_by_field(value: Any) -> bool:
    """Whether Bridge reads a value's fields and nothing else of it, from a copy as well."""
    kind = type(value)
    if isinstance(value, ConfigContainerBase):
        return True
    return is_dataclass(kind) and hasattr(value, "__dict__") and not any(hasattr(kind, way) for way in _OWN_WAYS)


def _with_fields(value: Any, other: Callable[[Any], Any]) -> Any:
    """A dataclass with its fields copied, but for private ones: Bridge leaves those out, process groups among them."""
    copied = object.__new__(type(value))
    names = (field.name for field in fields(value) if not field.name.startswith("_"))
    parts = {name: _copied(getattr(value, name), other) for name in names}
    copied.__dict__.update(vars(value) | parts)
    return copied


def _torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which reader reads a model: found by looking at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.live.readers.dtensor import DTensorReader
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import MegatronFsdpReader
from mbridge_fsdp_ckpt.live.readers.protocol import Reader
from mbridge_fsdp_ckpt.live.refusals import described, refuse_second_version
from mbridge_fsdp_ckpt.remedies import remedy

Find = Callable[[Any], Reader | None]
"""Looks at a model; returns its reader, or None where it is another's."""

_finders: dict[str, Find] = {}


def register_reader(name: str, find: Find) -> None:
    """Add a reader of another wrapper; it is asked before those of this package.

    Args:
        name: What errors call the wrapper.
        find: Looks at a model that a caller passed; it may be a list of one.

    Raises:
        ConfigurationError: Another reader has this name.
    """
    if name in _finders or name in _BUILT_IN:
        raise ConfigurationError(
            expected="one reader of each name", found=f"another one of {name!r}", remedy="Give it another name."
        )
    _finders[name] = find


def unregister_reader(name: str) -> None:
    """Remove one that was added; unknown names are ignored."""
    _finders.pop(name, None)


def reader_for(model: Any) -> Reader:
    """The reader of a model.

    Raises:
        ConfigurationError: No reader knows it.
    """
    for find in (*_finders.values(), *_BUILT_IN.values()):
        if (reader := find(model)) is not None:
            return reader
    refuse_second_version(model)
    raise ConfigurationError(
        expected=f"one model under {', or '.join((*_finders, *_BUILT_IN))}",
        found=described(model),
        remedy=remedy(
            "Wrap the model before it is saved or loaded.",
            "Set {megatron_fsdp}.",
            "Virtual pipeline stages are not supported.",
        ),
    )


_BUILT_IN: dict[str, Find] = {
    "Megatron-FSDP v1": MegatronFsdpReader.find,
    "torch's FSDP2 (fully_shard) or DTensor parallelism": DTensorReader.find,
}

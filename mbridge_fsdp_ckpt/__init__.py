# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checkpoints that people who train with Megatron-FSDP can trust: the format `fsdp_dtensor_safe`.

    import mbridge_fsdp_ckpt
    mbridge_fsdp_ckpt.register()          # then: checkpoint.ckpt_format=fsdp_dtensor_safe in Megatron-Bridge

Or without a framework: `save(directory, model=..., optimizer=...)` and `load(...)`.
Importing this package imports neither torch nor Megatron; see docs/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.checkpoint import (
        LoadResult,
        SaveHandle,
        SaveResult,
        Settings,
        async_save,
        finish_saves,
        load,
        load_optimizer,
        load_weights,
        release_staging,
        save,
    )
    from mbridge_fsdp_ckpt.integrations.bridge import register, unregister

__version__ = "0.1.0"

__all__ = [
    "FORMAT_NAME",
    "STOCK_FORMAT",
    "LoadResult",
    "SaveHandle",
    "SaveResult",
    "Settings",
    "__version__",
    "async_save",
    "finish_saves",
    "load",
    "load_optimizer",
    "load_weights",
    "register",
    "release_staging",
    "save",
    "unregister",
]

_HOMES = {
    "LoadResult": "checkpoint",
    "SaveResult": "checkpoint",
    "SaveHandle": "checkpoint",
    "Settings": "checkpoint",
    "async_save": "checkpoint",
    "finish_saves": "checkpoint",
    "load": "checkpoint",
    "load_optimizer": "checkpoint",
    "load_weights": "checkpoint",
    "release_staging": "checkpoint",
    "save": "checkpoint",
    "register": "integrations.bridge",
    "unregister": "integrations.bridge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

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
        Loaded,
        Saved,
        Saving,
        Settings,
        finish_saves,
        load,
        load_optimizer_only,
        load_weights_only,
        release_staging,
        save,
    )
    from mbridge_fsdp_ckpt.integrations.bridge import register, unregister

__version__ = "0.1.0"

__all__ = [
    "FORMAT_NAME",
    "STOCK_FORMAT",
    "Loaded",
    "Saved",
    "Saving",
    "Settings",
    "__version__",
    "finish_saves",
    "load",
    "load_optimizer_only",
    "load_weights_only",
    "register",
    "release_staging",
    "save",
    "unregister",
]

_HOMES = {
    "Loaded": "checkpoint",
    "Saved": "checkpoint",
    "Saving": "checkpoint",
    "Settings": "checkpoint",
    "finish_saves": "checkpoint",
    "load": "checkpoint",
    "load_optimizer_only": "checkpoint",
    "load_weights_only": "checkpoint",
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

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks import before CUDA is replaced, and whether it is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

MEGATRON_MODULES = (
    "transformer_engine.pytorch",  # first: it looks for CUDA while imported
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.datasets.utils",
    "megatron.core.models.mimo",
    "fla.modules",
    "mbridge_fsdp_ckpt.checkpoint",  # what cases would import one after another, a worker each
)

BRIDGE_MODULES = (
    *MEGATRON_MODULES,
    "megatron.bridge.training.pretrain",
    "mbridge_fsdp_ckpt.integrations.bridge.manager",
)


def is_installed(module: str) -> bool:
    """Whether `module` could be imported; nothing but its parent packages is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def installed(modules: Iterable[str]) -> list[str]:
    """Those whose package is installed."""
    return [module for module in modules if is_installed(module.partition(".")[0])]

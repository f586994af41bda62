# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Functions of Bridge's conversion that do not go through its checkpointing.

`plugin.register` puts these in place:

model_load_save.save_megatron_model                 its low-memory way hands over a state dict, made for other
                                                    formats; this one copies no state, and saves the model
checkpointing._load_model_weights_from_checkpoint   fills a model that nothing wraps (`load_megatron_model`)
model_load_save.build_and_load_model                leaves a process group behind only if it found one: of torchrun's
                                                    ranks each would build the model alone, and an export afterwards
                                                    has no group.  For this format's directories they join first
AutoBridge.load_megatron_model                      takes the highest number in a root; here, what the trackers mean
checkpoint_utils.is_checkpoint_iteration_directory  does not know this format's manifest: without DCP metadata beside
                                                    it, set-up would begin with random weights
models.conversion.param_mapping                     see `upstream_fixes.bridge_export`
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.format.names import ITERATION, MANIFEST_NAME
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.files import entries
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.patching import Patches


def replacements(is_ours: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """Bridge's functions, each with its replacement.

    Args:
        is_ours: Takes a format's name and returns whether this package saves it.
    """
    from megatron.bridge.training import checkpointing, model_load_save
    from megatron.bridge.training.utils import checkpoint_utils

    iteration_directory = checkpoint_utils.is_checkpoint_iteration_directory
    save, load = model_load_save.save_megatron_model, checkpointing._load_model_weights_from_checkpoint
    build = model_load_save.build_and_load_model
    return [
        (save, _wrap_save_megatron_model(save, is_ours)),
        (load, _wrap_load_weights(load)),
        (build, _wrap_build_and_load(build)),
        (iteration_directory, _wrap_is_iteration_directory(iteration_directory)),
    ]


def follow_trackers(patches: Patches) -> None:
    """Replace `AutoBridge.load_megatron_model` to load the checkpoint that a root's trackers name.

    It does so only for a root with checkpoints of this format.
    """
    from megatron.bridge import AutoBridge

    original = AutoBridge.load_megatron_model

    @functools.wraps(original)
    def load_megatron_model(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        root = as_path(path)
        ours = any((directory / MANIFEST_NAME).exists() for directory in entries(root, ITERATION))
        return original(self, str(find_checkpoint(root)) if ours else path, *args, **kwargs)

    patches.set(AutoBridge, "load_megatron_model", load_megatron_model)


def _wrap_is_iteration_directory(original: Callable[[str | None], bool]) -> Callable[[str | None], bool]:
    @functools.wraps(original)
    def is_checkpoint_iteration_directory(path: str | None) -> bool:
        return original(path) or (path is not None and (as_path(path) / MANIFEST_NAME).exists())

    return is_checkpoint_iteration_directory


def _wrap_save_megatron_model(original: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_megatron_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if is_ours(call.arguments.get("ckpt_format")):
            call.arguments["low_memory_save"] = False
        return original(*call.args, **call.kwargs)

    return save_megatron_model


def _wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_model_weights(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        directory = as_path(call.arguments["checkpoint_path"])
        if not (directory / MANIFEST_NAME).exists():
            return original(*args, **kwargs)
        from mbridge_fsdp_ckpt.integrations.bridge.plain_model import load_plain

        model = call.arguments["model"]
        load_plain(directory, model)
        return {"model": model[0].state_dict()} if call.arguments.get("return_state_dict") else None

    return load_model_weights


def _wrap_build_and_load(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build_and_load_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        provider = call.arguments["model_cfg"]
        alone = "WORLD_SIZE" not in os.environ
        is_here = (as_path(call.arguments["checkpoint_path"]) / MANIFEST_NAME).exists()
        if alone or dist.is_initialized() or not is_here or not hasattr(provider, "initialize_model_parallel"):
            return original(*args, **kwargs)
        from mbridge_fsdp_ckpt.integrations.bridge.process_group import join

        join()
        provider.finalize()
        provider.initialize_model_parallel(seed=0 if torch.cuda.is_available() else None)
        call.arguments["skip_temp_dist_context"] = True
        return original(*call.args, **call.kwargs)

    return build_and_load_model

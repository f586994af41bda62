"""Where Bridge's conversion passes its checkpointing by.

`plugin.register` puts these in place:

model_load_save.save_megatron_model                 its low-memory way hands over a state dict, made for other
                                                    formats; this one copies no state, and saves the model
checkpointing._load_model_weights_from_checkpoint   fills a model that nothing wraps (`load_megatron_model`)
models.conversion.param_mapping                     see `export_fix`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mbridge_fsdp_ckpt.storage.files import as_path
from mbridge_fsdp_ckpt.storage.manifest import MANIFEST_NAME


def replacements(safe_format: str) -> list[tuple[Any, Any]]:
    """Bridge's functions, each with what takes its place."""
    from megatron.bridge.training import checkpointing, model_load_save

    save, load = model_load_save.save_megatron_model, checkpointing._load_model_weights_from_checkpoint
    return [(save, _saving_the_model(save, safe_format)), (load, _from_our_directory(load))]


def _saving_the_model(stock: Callable[..., Any], safe_format: str) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_megatron_model(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("ckpt_format") == safe_format:
            call.arguments["low_memory_save"] = False
        return stock(*call.args, **call.kwargs)

    return save_megatron_model


def _from_our_directory(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def load_model_weights(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        directory = as_path(call.arguments["checkpoint_path"])
        if not (directory / MANIFEST_NAME).exists():
            return stock(*args, **kwargs)
        from mbridge_fsdp_ckpt.bridge.plain_model import load_plain

        model = call.arguments["model"]
        load_plain(directory, model)
        return {"model": model[0].state_dict()} if call.arguments.get("return_state_dict") else None

    return load_model_weights

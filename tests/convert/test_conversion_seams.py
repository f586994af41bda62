# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `register()` replaces in Bridge's conversion, and puts back."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

import mbridge_fsdp_ckpt
from testing.ranks import RankPool, no_process_group

pytestmark = pytest.mark.bridge


def _names() -> dict[str, Any]:
    from megatron.bridge.models.conversion import param_mapping
    from megatron.bridge.training import checkpointing, model_load_save

    return {
        "save": model_load_save.save_megatron_model,
        "load": checkpointing._load_model_weights_from_checkpoint,
        "sharded": param_mapping._module_uses_fsdp,
        "chunked": param_mapping.ChunkedMapping.megatron_to_hf,
        "mamba": param_mapping.MambaInProjMapping.megatron_to_hf,
    }


@no_process_group
def register_and_unregister() -> tuple[bool, bool]:
    mbridge_fsdp_ckpt.unregister()
    stock = _names()
    mbridge_fsdp_ckpt.register()
    ours = _names()
    mbridge_fsdp_ckpt.unregister()
    return all(ours[name] is not stock[name] for name in stock), _names() == stock


def test_register_replaces_and_unregister_restores(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(register_and_unregister, ranks=1) == [(True, True)]


@no_process_group
def low_memory_save(ckpt_format: str) -> Any:
    """Which way Bridge's function takes."""
    from megatron.bridge.training import model_load_save

    seen: list[Any] = []

    def save_megatron_model(
        model: Any, path: str, ckpt_format: str = "torch_dist", low_memory_save: bool = False
    ) -> None:
        seen.append(low_memory_save)

    mbridge_fsdp_ckpt.unregister()
    with patch.object(model_load_save, "save_megatron_model", save_megatron_model):
        mbridge_fsdp_ckpt.register()
        model_load_save.save_megatron_model([], "path", ckpt_format=ckpt_format, low_memory_save=True)
        mbridge_fsdp_ckpt.unregister()
    return seen


@pytest.mark.parametrize(("ckpt_format", "kept"), [("fsdp_dtensor_safe", False), ("torch_dist", True)])
def test_only_this_format_is_saved_from_the_model(ckpt_format: str, kept: bool, bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(low_memory_save, ckpt_format, ranks=1) == [[kept]]


@no_process_group
def load_elsewhere(directory: str) -> str:
    """What Bridge says to a directory that is not of this format."""
    from megatron.bridge.training import checkpointing

    mbridge_fsdp_ckpt.register()
    try:
        checkpointing._load_model_weights_from_checkpoint(directory, [])
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_other_directories_go_to_bridge(bridge_ranks: RankPool, tmp_path: Any) -> None:
    (found,) = bridge_ranks.run(load_elsewhere, str(tmp_path), ranks=1)
    assert found == "CheckpointingException"  # of Megatron-Core

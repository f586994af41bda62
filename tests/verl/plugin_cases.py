# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the plug-in."""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mbridge_fsdp_ckpt import versions
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.integrations.common import options
from mbridge_fsdp_ckpt.integrations.verl import plugin
from tests.models.imported import gloo_gathers_uneven
from tests.patched import errors_without_each_name, gone
from tests.verl import tiny
from tests.verl.tiny import Setup


def errors_of_building(attempts: list[tuple[Setup, dict[str, str]]]) -> list[tuple[str, str]]:
    """Name and text of what building each engine raises, under some environment."""
    return [_error_of_building(*attempt) for attempt in attempts]


def _error_of_building(setup: Setup, environment: dict[str, str]) -> tuple[str, str]:
    with patch.dict(os.environ, environment):
        try:
            tiny.build(setup)
        except CheckpointError as error:
            return type(error).__name__, str(error)
    return "", ""


def said_of_options(setups: list[Setup]) -> list[str]:
    """What is printed as a warning while engines are built, each twice."""
    said: list[str] = []
    options.forget()
    for setup in setups:
        with redirect_stdout(StringIO()) as out:
            tiny.build(setup)
            tiny.build(setup)
        said.append("\n".join(line for line in out.getvalue().splitlines() if line.startswith("WARNING: ")))
    return said


def said_of_versions(setup: Setup, found: dict[str, str]) -> list[str]:
    """What is said while an engine is built where other versions are installed; it is built all the same."""
    said: list[str] = []
    versions.forget()
    with (
        patch.object(versions, "version", lambda name: found.get(name) or version(name)),
        patch.object(versions._log, "warning", lambda text, *values: said.append(text % values)),
    ):
        tiny.build(setup)
    versions.forget()
    return said


def errors_without_names() -> dict[str, str]:
    """What is raised where a role asks for our format and one name of VeRL's is gone, for each of them."""
    from verl.workers.engine.megatron import transformer_impl

    assert transformer_impl  # patched when it is imported
    return errors_without_each_name(("VeRL",), plugin._require)


def error_without_the_save(setup: Setup) -> tuple[str, str]:
    """What building an engine raises where VeRL's manager has no save that could be replaced."""
    versions.forget()
    with gone(
        "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager._save_megatron_fsdp_checkpoint"
    ):
        return _error_of_building(setup, {})


def untouched_without_the_override(setup: Setup) -> dict[str, bool]:
    """Whether an engine that does not ask for our format gets VeRL's, Bridge's and Megatron's own."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.bridge.training import checkpointing
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    hybrid = tiny.build(setup).optimizer.optimizer
    engine = tiny.build(setup.on(optimizer="fused"))  # stock's load makes the optimizer step, which the other cannot
    place = Path(setup.directory) / "model" / "dist_ckpt"
    saved: list[Any] = []
    loaded: list[Any] = []

    def save(path: str, state: Any, **_: Any) -> None:
        saved.append((path, set(state)))

    def load(**kwargs: Any) -> Any:
        loaded.append(kwargs["checkpoint_path_override"])
        raise _EnoughError

    with (
        patch.object(checkpointing, "save_fsdp_dtensor_checkpoint", save),
        patch.object(checkpointing, "load_fsdp_dtensor_checkpoint", load),
        gloo_gathers_uneven(),
    ):
        engine.save_checkpoint(setup.directory, global_step=1)
        (place / ".metadata").touch()
        with suppress(_EnoughError):
            engine.load_checkpoint(setup.directory)
    return {
        "saved by stock": saved == [(str(place), {"model", "optimizer", "lr_scheduler", "rng_state"})],
        "loaded by stock": loaded == [str(place)],
        "nothing written by us": [path.name for path in place.iterdir()] == [".metadata"],
        "Megatron's optimizer": type(hybrid) is HybridDeviceOptimizer,
        "Megatron's name for it": megatron_optimizer.HybridDeviceOptimizer is HybridDeviceOptimizer,
    }


class _EnoughError(Exception):
    """Stock's load was reached."""


def taken_over(setup: Setup) -> dict[str, bool]:
    """What MBRIDGE_FSDP_CKPT_TAKEOVER=1 does to engines that name no format."""
    from mbridge_fsdp_ckpt.upstream_fixes.hybrid_optimizer import ShardedHybridDeviceOptimizer

    with patch.dict(os.environ, MBRIDGE_FSDP_CKPT_TAKEOVER="1"):
        without = tiny.build(setup.on(optimizer="fused", fsdp=False, overlap=False))
        engine = tiny.build(setup)
        with gloo_gathers_uneven():
            engine.save_checkpoint(setup.directory, global_step=1)
    return {
        "without Megatron-FSDP is built": without.checkpoint_mananager is not None,
        "sharded": isinstance(engine.optimizer.optimizer, ShardedHybridDeviceOptimizer),
    }


def install_and_uninstall(setup: Setup) -> dict[str, bool]:
    """Whether the plug-in's import replaced methods, once, and undoing it brings back all that was there before."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from verl.utils.checkpoint import CheckpointHandler
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from mbridge_fsdp_ckpt.integrations.verl import install, uninstall

    def methods() -> dict[str, Any]:
        owners = (MegatronCheckpointManager, MegatronEngine, CheckpointHandler)
        return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}

    at_import = methods()
    install()
    again = methods()
    tiny.build(setup)
    registered = megatron_optimizer.HybridDeviceOptimizer is not HybridDeviceOptimizer
    uninstall()
    stock = methods()
    uninstall()
    stock_again = methods()
    install()
    back = methods()
    changed = {name for name in stock if stock[name] is not at_import[name]}
    return {
        "just these were replaced": changed
        == {
            "CheckpointHandler._determine_resume_path",
            "MegatronCheckpointManager.__init__",
            "MegatronCheckpointManager.load_checkpoint",
            "MegatronCheckpointManager._save_megatron_fsdp_checkpoint",
            "MegatronCheckpointManager._load_megatron_fsdp_checkpoint",
            "MegatronCheckpointManager._dispatch_finalize",
            "MegatronEngine.save_checkpoint",
            "MegatronEngine._build_optimizer",
        },
        "idempotent": at_import == again and stock == stock_again,
        "restored": all(at_import[name].__wrapped__ is back[name].__wrapped__ is stock[name] for name in changed),
        "registered, and no longer": registered and megatron_optimizer.HybridDeviceOptimizer is HybridDeviceOptimizer,
    }

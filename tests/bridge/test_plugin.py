"""`register()` and `unregister()`, and what Bridge's users can get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.testing.ranks import RankPool, no_process_group
from tests.bridge.training import Run, configuration, train
from tests.core import cases

pytestmark = pytest.mark.bridge


def _names() -> dict[str, Any]:
    import megatron.core.optimizer as megatron_optimizer
    from megatron.bridge.training import checkpointing, model_load_save, optim, setup
    from megatron.bridge.training.config import ConfigContainer

    return {
        "validate": ConfigContainer.validate,
        "save": checkpointing.save_checkpoint,
        "save, imported early": model_load_save.save_checkpoint,
        "load": checkpointing._load_checkpoint_from_path,
        "load, imported early": setup._load_checkpoint_from_path,
        "hybrid": megatron_optimizer.HybridDeviceOptimizer,
        "sync": optim.sync_hybrid_device_optimizer_fp32_master_copies,
        "sync, imported early": setup.sync_hybrid_device_optimizer_fp32_master_copies,
    }


@no_process_group
def register_and_unregister() -> dict[str, bool]:
    mbridge_fsdp_ckpt.unregister()
    stock = _names()
    mbridge_fsdp_ckpt.register()
    once = _names()
    mbridge_fsdp_ckpt.register()
    twice = _names()
    mbridge_fsdp_ckpt.unregister()
    after = _names()
    return {
        "all replaced": all(once[name] is not stock[name] for name in stock),
        "idempotent": once == twice,
        "restored": after == stock,
    }


def test_register_is_idempotent_and_unregister_restores(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(register_and_unregister, ranks=1) == [
        {"all replaced": True, "idempotent": True, "restored": True}
    ]


@no_process_group
def instantiated_by_bridge(directory: str) -> dict[str, str]:
    """What Bridge makes of targets below this package that a checkpoint's run configuration names."""
    from megatron.bridge.training.model_load_save import load_model_config

    from mbridge_fsdp_ckpt.bridge.choice import MANAGER

    mbridge_fsdp_ckpt.unregister()
    mbridge_fsdp_ckpt.register()
    script, ran = Path(directory, "script.py"), Path(directory, "ran")
    script.write_text(f"open({str(ran)!r}, 'w').close()")
    found: dict[str, str] = {}
    for target in (*BELOW_THIS_PACKAGE, MANAGER):
        place = Path(directory, str(len(found)))
        place.mkdir()
        said: dict[str, Any] = {"_target_": target} | (
            {"script": str(script), "arguments": []} if "execute" in target else {}
        )
        said |= {"checkpoint_config": None} if target == MANAGER else {}
        (place / "run_config.yaml").write_text(json.dumps({"model": said}))  # JSON is YAML, too
        try:
            found[target] = type(load_model_config(str(place))[0]).__name__
        except BaseException as error:  # a script may end with whatever it likes
            found[target] = type(error).__name__
        assert not ran.exists(), f"{target} ran"
    return found


BELOW_THIS_PACKAGE = (
    "mbridge_fsdp_ckpt.cli.run.execute",
    "mbridge_fsdp_ckpt.unregister",
    "mbridge_fsdp_ckpt.bridge.manager.torch.os.getcwd",
    "mbridge_fsdp_ckpt.bridge.manager.SafeCheckpointManagerEvil",
    "mbridge_fsdp_ckpt.bridge.manager.SafeCheckpointManager.save",
    "mbridge_fsdp_ckpt.bridge.manager.SafeCheckpointManager.mro",
)


def test_a_run_configuration_may_name_the_manager_and_no_more(bridge_ranks: RankPool, tmp_path: Path) -> None:
    (found,) = bridge_ranks.run(instantiated_by_bridge, str(tmp_path), ranks=1)
    assert found.pop("mbridge_fsdp_ckpt.bridge.manager.SafeCheckpointManager") == "SafeCheckpointManager"
    assert found == dict.fromkeys(BELOW_THIS_PACKAGE, "InstantiationException")


@no_process_group
def allowed_after_unregister() -> bool:
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    from mbridge_fsdp_ckpt.bridge.choice import MANAGER

    mbridge_fsdp_ckpt.register()
    mbridge_fsdp_ckpt.unregister()
    return bool(target_allowlist.is_allowed(MANAGER))


def test_unregister_takes_the_manager_off_the_list(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(allowed_after_unregister, ranks=1) == [False]


@no_process_group
def refused(run: Run) -> tuple[str, str]:
    mbridge_fsdp_ckpt.register()
    try:
        configuration(run).validate()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"format": "fsdp_dtensor_saef"}, "UnknownFormatError", "Did you mean 'fsdp_dtensor_safe'?"),
        ({"format": "fsdp-dtensor"}, "UnknownFormatError", "Did you mean 'fsdp_dtensor'?"),
        ({"config": {"checkpoint.async_save": True}}, "ConfigurationError", "checkpoint.async_save=True"),
        ({"config": {"checkpoint.custom_manager_class": "a.B"}}, "ConfigurationError", "custom_manager_class='a.B'"),
    ],
)
def test_wrong_settings_are_named_on_every_rank(
    changes: dict[str, Any], error: str, says: str, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    results = bridge_ranks.run(refused, Run(str(tmp_path)).on(**changes), ranks=2)
    assert [name for name, _ in results] == [error] * 2
    assert all(says in text for _, text in results)


@no_process_group
def unsupported(package: str) -> str:
    from unittest.mock import patch

    mbridge_fsdp_ckpt.unregister()
    found = {"torch": "2.9.0", "megatron-core": "0.16.0", "megatron-bridge": "0.2.0"}
    real = {"torch": "2.13.0", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", package: found[package]}
    before = _names()
    with patch("mbridge_fsdp_ckpt.versions.version", real.__getitem__):
        try:
            mbridge_fsdp_ckpt.register()
        except CheckpointError as error:
            assert _names() == before, "something was patched"
            return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")


@pytest.mark.parametrize("package", ["torch", "megatron-core", "megatron-bridge"])
def test_unsupported_versions_are_refused_with_the_versions_that_work(package: str, bridge_ranks: RankPool) -> None:
    (text,) = bridge_ranks.run(unsupported, package, ranks=1)
    assert text.startswith(f"UnsupportedVersionError: expected {package}>=")


def test_without_saved_optimizer_state_a_run_goes_on_only_if_it_keeps_none(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), iterations=2, config={"checkpoint.save_optim": False})
    bridge_ranks.run(train, run, ranks=2)
    assert not (tmp_path / "iter_0000002" / "manifest.json").read_text().count("exp_avg")
    resumed = bridge_ranks.run(train, run.on(iterations=3, save_every=3), ranks=2)[0]
    assert list(resumed["losses"]) == [3]
    results = bridge_ranks.run(resume_with_optimizer, run.on(iterations=4, config={}), ranks=2)
    assert all("KeyMismatchError" in text and "load_optim=False" in text for text in results)


@no_process_group
def resume_with_optimizer(run: Run) -> str:
    try:
        train(run)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("optimizer state was missing, and nobody said so")


def test_an_iteration_that_the_tracker_names_but_is_gone(bridge_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    results = bridge_ranks.run(resume_with_optimizer, Run(str(tmp_path)), ranks=2)
    assert all("NotACheckpointError" in text and "iter_0000007" in text for text in results)
    assert cases.names_in(tmp_path) == ["latest_checkpointed_iteration.txt"]

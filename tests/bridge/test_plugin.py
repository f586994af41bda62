# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`register()` and `unregister()`, and what Bridge's users can get wrong."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import versions
from mbridge_fsdp_ckpt.errors import CheckpointError, UnsupportedVersionError
from testing.ranks import RankPool, no_process_group
from tests import options
from tests.bridge.training import Run, configuration, train
from tests.core import cases
from tests.patched import errors_without_each_name, gone, unnamed
from tests.upstream import is_before

pytestmark = pytest.mark.bridge


def _names() -> dict[str, Any]:
    import megatron.core.optimizer as megatron_optimizer
    from megatron.bridge.training import checkpointing, model_load_save, setup
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState

    return {
        "validate": ConfigContainer.validate,
        "save": checkpointing.save_checkpoint,
        "save, imported early": model_load_save.save_checkpoint,
        "finalize": checkpointing.maybe_finalize_async_save,
        "start worker": GlobalState.initialize_async_checkpoint_worker,
        "load": checkpointing._load_checkpoint_from_path,
        "load, imported early": setup._load_checkpoint_from_path,
        "hybrid": megatron_optimizer.HybridDeviceOptimizer,
        **_sync(),
    }


def _sync() -> dict[str, Any]:
    """Bridge 0.5 has none."""
    from megatron.bridge.training import optim, setup

    name = "sync_hybrid_device_optimizer_fp32_master_copies"
    return {where.__name__: getattr(where, name) for where in (optim, setup) if hasattr(where, name)}


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

    from mbridge_fsdp_ckpt.integrations.bridge.options import MANAGER

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
    "mbridge_fsdp_ckpt.tools.command.run.execute",
    "mbridge_fsdp_ckpt.unregister",
    "mbridge_fsdp_ckpt.integrations.bridge.manager.torch.os.getcwd",
    "mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManagerEvil",
    "mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManager.save",
    "mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManager.mro",
)


def test_a_run_configuration_may_name_the_manager_and_no_more(bridge_ranks: RankPool, tmp_path: Path) -> None:
    (found,) = bridge_ranks.run(instantiated_by_bridge, str(tmp_path), ranks=1)
    assert found.pop("mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManager") == "SafeCheckpointManager"
    assert found == dict.fromkeys(BELOW_THIS_PACKAGE, "InstantiationException")


@no_process_group
def allowed_after_unregister() -> bool:
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    from mbridge_fsdp_ckpt.integrations.bridge.options import MANAGER

    mbridge_fsdp_ckpt.register()
    mbridge_fsdp_ckpt.unregister()
    return bool(target_allowlist.is_allowed(MANAGER))


def test_unregister_takes_the_manager_off_the_list(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(allowed_after_unregister, ranks=1) == [False]


def test_its_files_declare_the_options_that_it_has(bridge_ranks: RankPool) -> None:
    (has,) = bridge_ranks.run(no_process_group(options.of_bridge), ranks=1)
    assert sorted(has) == sorted(options.declared("Megatron-Bridge")), "see tests/unit/test_options.py"


@no_process_group
def refused(runs: list[Run]) -> list[tuple[str, str]]:
    """What `validate` raises, and before anything has changed."""
    mbridge_fsdp_ckpt.unregister()
    mbridge_fsdp_ckpt.register()
    return [_refusal(configuration(run)) for run in runs]


def _refusal(config: Any) -> tuple[str, str]:
    before = str(config)
    try:
        config.validate()
    except CheckpointError as error:
        assert str(config) == before
        return type(error).__name__, str(error)
    return "", "not refused"


def of_checkpoint(**settings: Any) -> dict[str, Any]:
    return {"config": {f"checkpoint.{name}": value for name, value in settings.items()}}


BRIDGE_05 = is_before("megatron-bridge", "0.6")  # has no export beside checkpoints
REFUSED: dict[str, dict[str, Any]] = {
    "Did you mean 'fsdp_dtensor_safe'?": {"format": "fsdp_dtensor_saef"},
    "Did you mean 'fsdp_dtensor'?": {"format": "fsdp-dtensor"},
    "found checkpoint.non_persistent_ckpt_type='local', checkpoint.custom_manager_class='a.B'. ": of_checkpoint(
        custom_manager_class="a.B", non_persistent_ckpt_type="local"
    ),
    "Set checkpoint.non_persistent_ckpt_type='global'": of_checkpoint(non_persistent_save_interval=3),
    "found checkpoint.most_recent_k=None": of_checkpoint(most_recent_k=None),
} | ({} if BRIDGE_05 else {"Export checkpoints with `mbridge_fsdp_ckpt": of_checkpoint(also_save_hf_checkpoint=True)})


def test_wrong_settings_are_named_on_every_rank_and_nothing_has_changed(bridge_ranks: RankPool, tmp_path: Path) -> None:
    runs = [Run(str(tmp_path)).on(**changes) for changes in REFUSED.values()]
    results = bridge_ranks.run(refused, runs, ranks=2)
    for errors in results:
        kinds = [name for name, _ in errors]
        assert kinds == ["UnknownFormatError"] * 2 + ["ConfigurationError"] * (len(runs) - 2)
        assert [says for says, (_, text) in zip(REFUSED, errors, strict=True) if says not in text] == []


@no_process_group
def refused_second_version() -> tuple[str, str]:
    """With a setting that only Megatron-Core 0.20 has."""
    import dataclasses

    mbridge_fsdp_ckpt.register()
    config = configuration(Run("nowhere"))
    coming = dataclasses.make_dataclass("Coming", [("megatron_fsdp_version", int, 1)], bases=(type(config.ddp),))
    config.ddp = coming(use_megatron_fsdp=True, megatron_fsdp_version=2)
    return _refusal(config)


def test_megatron_fsdp_v2_is_refused_by_name(bridge_ranks: RankPool) -> None:
    ((name, text),) = bridge_ranks.run(refused_second_version, ranks=1)
    assert name == "ConfigurationError"
    assert "found ddp.megatron_fsdp_version=2. Megatron-FSDP v2 is not supported yet." in text


@no_process_group
def said_by_validate(runs: list[Run]) -> list[str]:
    """What is printed where each configuration is validated twice."""
    from contextlib import redirect_stdout
    from io import StringIO

    said: list[str] = []
    for run in runs:
        mbridge_fsdp_ckpt.unregister()
        mbridge_fsdp_ckpt.register()
        config = configuration(run)
        with redirect_stdout(StringIO()) as out:
            config.validate()
            config.validate()
        said.append("\n".join(line for line in out.getvalue().splitlines() if line.startswith("WARNING: ")))
    return said


def test_rank_0_says_once_what_has_no_effect_and_nothing_by_default(bridge_ranks: RankPool, tmp_path: Path) -> None:
    run, idle = Run(str(tmp_path)), {"ckpt_convert_format": "torch", "use_checkpoint_args": True}
    idle |= {"load_optim": False, "load_main_params_from_ckpt": True, "dist_ckpt_strictness": "log_all"}
    more = of_checkpoint(**idle, exit_on_missing_checkpoint=True)["config"]
    runs = [run, run.on(config=more | {"rerun_state_machine.rerun_mode": "validate_results"})]
    runs.append(run.on(config=of_checkpoint(async_save=True, strict_fsdp_dtensor_load=True)["config"]))
    first, second = bridge_ranks.run(said_by_validate, runs, ranks=2)
    assert second == ["", "", ""]
    assert (first[0], first[2]) == ("", "")
    lines = first[1].splitlines()
    written = {f"checkpoint.{name}={value!r}" for name, value in idle.items() if name != "load_optim"}
    written.add("rerun_state_machine.rerun_mode='validate_results'")
    assert len(lines) == len(written)
    assert {line.split(" ")[1] for line in lines} == written
    assert all("has no effect with fsdp_dtensor_safe: " in line for line in lines if "rerun" not in line)


@no_process_group
def trained_into_doubt(run: Run) -> tuple[int | str | None, str]:
    """How a run ends whose first result is wrong twice, as Megatron's own injector makes it; and what was printed."""
    from contextlib import redirect_stdout
    from io import StringIO

    mbridge_fsdp_ckpt.unregister()
    with redirect_stdout(StringIO()) as out:
        try:
            train(run)
        except SystemExit as error:
            return error.code, out.getvalue()
    return None, out.getvalue()


def test_a_step_that_will_not_be_run_again_is_said_with_its_checkpoint(bridge_ranks: RankPool, tmp_path: Path) -> None:
    injected = {"rerun_mode": "validate_results", "error_injection_rate": 1, "error_injection_type": "persistent_error"}
    config = {f"rerun_state_machine.{name}": value for name, value in injected.items()}
    ((code, out),) = bridge_ranks.run(trained_into_doubt, Run(str(tmp_path), config=config), ranks=1)
    assert code == 16, out
    assert out.count("does not repeat the step whose result is in doubt") == 1


@no_process_group
def registering_without_each_name() -> dict[str, str]:
    mbridge_fsdp_ckpt.unregister()
    before = _names()

    def register() -> None:
        try:
            mbridge_fsdp_ckpt.register()
        finally:
            mbridge_fsdp_ckpt.unregister()

    errors = errors_without_each_name(("save and load", "corrections", "random states", "Bridge"), register)
    assert _names() == before, "something stayed patched"
    return errors


def test_every_name_that_is_gone_upstream_is_named(bridge_ranks: RankPool) -> None:
    (errors,) = bridge_ranks.run(registering_without_each_name, ranks=1)
    assert len(errors) > 50
    assert unnamed(errors) == []


@no_process_group
def patched_where_a_name_is_gone() -> bool:
    mbridge_fsdp_ckpt.unregister()
    versions.forget()
    before = _names()
    with gone("megatron.bridge.training.callbacks:should_fire"):
        try:
            mbridge_fsdp_ckpt.register()
        except UnsupportedVersionError:
            return _names() != before
    raise AssertionError("registered")


def test_where_a_name_is_gone_nothing_is_patched(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(patched_where_a_name_is_gone, ranks=1) == [False]


@no_process_group
def registered_beside(installed: dict[str, str]) -> list[str]:
    """What is said where other versions are installed; it works all the same."""
    from unittest.mock import patch

    mbridge_fsdp_ckpt.unregister()
    versions.forget()
    said: list[str] = []
    with (
        patch.object(versions, "version", lambda name: installed.get(name) or version(name)),
        patch.object(versions._log, "warning", lambda text, *values: said.append(text % values)),
    ):
        mbridge_fsdp_ckpt.register()
        mbridge_fsdp_ckpt.register()
    mbridge_fsdp_ckpt.unregister()
    return said


def test_another_version_that_has_every_name_runs_and_is_said_once(bridge_ranks: RankPool) -> None:
    other = {"torch": "2.9.0", "megatron-core": "0.20.0", "megatron-bridge": "0.7.0"}
    (said,) = bridge_ranks.run(registered_beside, other, ranks=1)
    assert [text.partition(" is outside")[0] for text in said] == [f"{name} {found}" for name, found in other.items()]
    assert bridge_ranks.run(registered_beside, {}, ranks=1) == [[]]


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

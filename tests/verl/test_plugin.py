# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How VeRL gets the plug-in, when it acts, and what a user can get wrong."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.integrations.verl.choice import VARIABLE, choice_of
from mbridge_fsdp_ckpt.settings import Settings
from testing.modules import is_installed
from testing.ranks import RankPool
from tests import options
from tests.patched import unnamed
from tests.verl import plugin_cases
from tests.verl.conftest import RANKS
from tests.verl.fresh import Fresh
from tests.verl.tiny import SAFE, Setup

PLUGIN = "mbridge_fsdp_ckpt.integrations.verl"
needs_verl = pytest.mark.skipif(not is_installed("verl"), reason="needs verl, which is not installed")


def test_importing_it_loads_no_framework_and_not_verl() -> None:
    heavy = ("torch", "numpy", "megatron", "transformer_engine", "verl", "ray", "omegaconf")
    program = f"import sys, {PLUGIN}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@needs_verl
@pytest.mark.parametrize(
    ("environment", "loaded"),
    [
        ({}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "mbridge_fsdp_ckpt"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, False),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": PLUGIN}, True),
    ],
)
def test_verl_loads_it_before_the_checkpoint_manager(environment: dict[str, str], loaded: bool, fresh: Fresh) -> None:
    assert [entry.value for entry in entry_points(group="verl.plugins") if entry.name == "mbridge_fsdp_ckpt"] == [
        PLUGIN
    ]
    manager = "verl.utils.checkpoint.megatron_checkpoint_manager"
    program = (
        f"import sys, verl; print({PLUGIN!r} in sys.modules, {manager!r} in sys.modules, 'megatron' in sys.modules)"
    )
    done = fresh.run(program, environment)
    assert (done.returncode, done.stdout.strip()) == (0, f"{loaded} False False"), done.stderr


class Config:
    """Shaped like VeRL's `McoreCheckpointConfig`."""

    def __init__(self, **mbridge_config: Any) -> None:
        self.mbridge_config = mbridge_config


@pytest.mark.parametrize(
    "config",
    [
        None,
        object(),
        {},
        {"mbridge_config": None},
        Config(),
        Config(distributed_filesystem=True),
        *(Config(ckpt_format=name) for name in ("fsdp_dtensor", "torch_dist", "mine")),
    ],
)
def test_other_formats_are_left_alone(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choice_of(config) is None
    monkeypatch.setenv(VARIABLE, "")
    assert choice_of(config) is None


def test_an_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SAFE)
    assert choice_of(Config(ckpt_format="fsdp_dtensor")) is None
    by_variable, by_override = choice_of(Config()), choice_of({"mbridge_config": {"ckpt_format": SAFE}})
    assert by_variable is not None
    assert by_variable.said == f"{VARIABLE}={SAFE}"
    assert by_override is not None
    assert by_override.said == f"checkpoint.mbridge_config.ckpt_format={SAFE}"


@pytest.mark.parametrize(("said", "taken"), [(None, True), ("fsdp_dtensor", True), ("torch_dist", False)])
def test_a_takeover_means_what_verl_itself_does_under_megatron_fsdp(
    said: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("MBRIDGE_FSDP_CKPT_TAKEOVER", "1")
    choice = choice_of(Config(ckpt_format=said) if said else Config())
    assert (choice is not None) is taken
    if choice is not None:
        assert choice.by_takeover
        assert choice.said == "MBRIDGE_FSDP_CKPT_TAKEOVER=1"


def test_settings_come_from_beside_the_format() -> None:
    given = {"time_limit": 900, "verify": "header", "allow_missing": ["model.*.bias"]}
    choice = choice_of(Config(ckpt_format=SAFE, fsdp_dtensor_safe=given))
    assert choice is not None
    assert choice.settings == Settings(time_limit=900, verify="header", allow_missing=("model.*.bias",))


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"ckpt_format": "fsdp_dtensor_saef"}, "UnknownFormatError", "Did you mean 'fsdp_dtensor_safe'?"),
        ({"ckpt_fromat": SAFE}, "ConfigurationError", "Write ckpt_format."),
        ({"ckpt_format": SAFE, SAFE: {"time_limitt": 9}}, "ConfigurationError", "Did you mean 'time_limit'?"),
        ({"ckpt_format": SAFE, SAFE: {"zzz": 9}}, "ConfigurationError", "Leave it out."),
        ({"ckpt_format": SAFE, SAFE: 9}, "ConfigurationError", "found 9"),
        ({"ckpt_format": SAFE, SAFE: {"verify": "twice"}}, "ConfigurationError", "one of full, header"),
    ],
)
def test_what_is_misspelt_is_named(config: dict[str, Any], error: str, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        choice_of(Config(**config))
    assert type(caught.value).__name__ == error
    assert says in str(caught.value)


@pytest.mark.bridge
def test_it_can_be_taken_out(source: str, verl_ranks: RankPool, tmp_path: Path) -> None:
    (found,) = verl_ranks.run(plugin_cases.install_and_uninstall, Setup(source, str(tmp_path / "run")), ranks=1)
    assert [name for name, holds in found.items() if not holds] == []


@pytest.mark.bridge
@pytest.mark.parametrize("mbridge_config", [{}, {"ckpt_format": "fsdp_dtensor"}])
def test_without_the_override_everything_is_stock(
    mbridge_config: dict[str, str], source: str, verl_ranks: RankPool, tmp_path: Path
) -> None:
    setup = Setup(source, str(tmp_path / "run"), mbridge_config=mbridge_config)
    for found in verl_ranks.run(plugin_cases.untouched_without_the_override, setup):
        assert [name for name, holds in found.items() if not holds] == []


@pytest.mark.bridge
def test_a_takeover_saves_here_and_leaves_runs_without_megatron_fsdp_alone(
    source: str, verl_ranks: RankPool, tmp_path: Path
) -> None:
    setup = Setup(source, str(tmp_path / "run"), mbridge_config={})
    for found in verl_ranks.run(plugin_cases.taken_over, setup):
        assert [name for name, holds in found.items() if not holds] == []
    assert (tmp_path / "run" / "model" / "dist_ckpt" / "manifest.json").is_file()


@pytest.mark.bridge
def test_what_cannot_work_is_refused_on_every_rank_before_training(
    source: str, verl_ranks: RankPool, tmp_path: Path
) -> None:
    setup = Setup(source, str(tmp_path / "run"))
    stock = setup.on(mbridge_config={})
    skipping = {"ckpt_format": SAFE, SAFE: {"when_busy": "skip"}}
    without = {"optimizer": "fused", "fsdp": False, "overlap": False}
    attempts = {
        "found 'fsdp_dtensor_saef'": (setup.on(mbridge_config={"ckpt_format": "fsdp_dtensor_saef"}), {}),
        "found 'fsdp-dtensor-safe'": (stock, {VARIABLE: "fsdp-dtensor-safe"}),
        "found checkpoint.save_contents=['model', 'optimiser']. ": (
            setup.on(checkpoint={"save_contents": ["model", "optimiser"]}),
            {},
        ),
        "found when_busy='skip'": (setup.on(mbridge_config=skipping, checkpoint={"async_save": True}), {}),
        "found use_megatron_fsdp=False (role actor)": (setup.on(**without), {}),
        f"Megatron-FSDP with {VARIABLE}={SAFE}": (stock.on(**without), {VARIABLE: SAFE}),
    }
    names = [
        "UnknownFormatError",
        "UnknownFormatError",
        *["ConfigurationError"] * 4,
    ]
    results = verl_ranks.run(plugin_cases.errors_of_building, list(attempts.values()))
    assert len(results) == RANKS
    for errors in results:
        assert [name for name, _ in errors] == names
        assert all(says in text for says, (_, text) in zip(attempts, errors, strict=True))


@pytest.mark.bridge
def test_its_files_declare_the_options_that_it_has(verl_ranks: RankPool) -> None:
    (has,) = verl_ranks.run(options.of_verl, ranks=1)
    assert sorted(has) == sorted(options.declared("VeRL")), "see tests/unit/test_options.py"


@pytest.mark.bridge
def test_rank_0_says_once_what_has_no_effect_and_nothing_by_default(
    source: str, verl_ranks: RankPool, tmp_path: Path
) -> None:
    setup = Setup(source, str(tmp_path / "run"))
    first, second = verl_ranks.run(plugin_cases.said_of_options, [setup, setup.on(checkpoint={"save_lora_only": True})])
    assert second == ["", ""]
    assert first[0] == ""
    assert first[1].count("checkpoint.save_lora_only=True has no effect with fsdp_dtensor_safe: ") == 1


@pytest.mark.bridge
def test_another_version_runs_and_says_so_once(source: str, verl_ranks: RankPool, tmp_path: Path) -> None:
    setup, other = Setup(source, str(tmp_path / "run")), {"verl": "0.10.0", "megatron-bridge": "0.7.0"}
    (said,) = verl_ranks.run(plugin_cases.said_of_versions, setup, other, ranks=1)
    assert sorted(text.partition(" is outside")[0] for text in said) == ["megatron-bridge 0.7.0", "verl 0.10.0"]
    assert verl_ranks.run(plugin_cases.said_of_versions, setup.on(mbridge_config={}), other, ranks=1) == [[]]


@pytest.mark.bridge
def test_a_name_that_is_gone_is_named_before_training(source: str, verl_ranks: RankPool, tmp_path: Path) -> None:
    (errors,) = verl_ranks.run(plugin_cases.errors_without_names, ranks=1)
    assert len(errors) > 5
    assert unnamed(errors) == []
    (refused,) = verl_ranks.run(plugin_cases.error_without_the_save, Setup(source, str(tmp_path / "run")), ranks=1)
    assert refused[0] == "UnsupportedVersionError"
    assert (
        "MegatronCheckpointManager._save_megatron_fsdp_checkpoint, which integrations/verl/plugin.py needs"
        in refused[1]
    )

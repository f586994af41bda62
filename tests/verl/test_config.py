# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The overrides, composed by Hydra from the configuration that VeRL ships, reach the plug-in as the user wrote them."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.integrations.verl.choice import VARIABLE, choice_of
from mbridge_fsdp_ckpt.settings import Settings
from testing.modules import is_installed
from tests.verl.fresh import Fresh

pytestmark = pytest.mark.skipif(not is_installed("verl"), reason="needs verl, which is not installed")

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "recipes" / "verl"
RECIPES = {
    "grpo": SCRIPTS / "grpo_qwen35_35b_a3b.sh",
    "sft": SCRIPTS / "sft_qwen35_35b_a3b.sh",
    "example": REPOSITORY / "examples" / "verl.sh",
}
TRAINERS = {"verl.trainer.main_ppo": "ppo_trainer", "verl.trainer.sft_trainer": "sft_trainer_engine"}
INPUTS = ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "CHECKPOINTS", "MASTER_ADDR", "NODE_RANK")

PPO, SFT = ["model_engine=megatron"], ["engine=megatron", "optim=megatron"]
OURS = "checkpoint._target_=mbridge_fsdp_ckpt.integrations.verl.config.SafeCheckpointConfig"
AS_MEGATRONS = "checkpoint._target_=verl.workers.config.McoreCheckpointConfig"
SAFE = "mbridge_config.ckpt_format=fsdp_dtensor_safe"


def composed(trainer: str, overrides: list[str]) -> Any:
    """What the trainer's `hydra.main` would hand over."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(trainer, overrides)


def as_dataclass(config: Any) -> Any:
    """As VeRL's trainers and workers do."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config)


@pytest.mark.parametrize(
    ("trainer", "overrides", "path"),
    [
        ("ppo_trainer", [*PPO, f"+actor_rollout_ref.actor.checkpoint.{SAFE}"], "actor_rollout_ref.actor.checkpoint"),
        ("ppo_trainer", [*PPO, f"+critic.checkpoint.{SAFE}"], "critic.checkpoint"),
        ("sft_trainer_engine", [*SFT, AS_MEGATRONS, f"+checkpoint.{SAFE}"], "checkpoint"),
    ],
)
def test_the_override_is_recognised(
    trainer: str, overrides: list[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omegaconf import OmegaConf

    monkeypatch.delenv(VARIABLE, raising=False)
    chosen = as_dataclass(OmegaConf.select(composed(trainer, overrides), path))
    choice = choice_of(chosen)
    assert choice is not None
    assert choice.said == f"checkpoint.{SAFE}"
    plain = [override for override in overrides if SAFE not in override]
    assert choice_of(as_dataclass(OmegaConf.select(composed(trainer, plain), path))) is None


@pytest.mark.parametrize(
    ("trainer", "overrides", "path"),
    [
        ("ppo_trainer", [*PPO, f"actor_rollout_ref.actor.{OURS}"], "actor_rollout_ref.actor.checkpoint"),
        ("ppo_trainer", [*PPO, f"critic.{OURS}"], "critic.checkpoint"),
        ("sft_trainer_engine", [*SFT, OURS], "checkpoint"),
    ],
)
def test_the_class_says_the_format_by_itself(trainer: str, overrides: list[str], path: str) -> None:
    from omegaconf import OmegaConf

    settings = f"+{path}.mbridge_config.fsdp_dtensor_safe.time_limit=900"
    choice = choice_of(as_dataclass(OmegaConf.select(composed(trainer, [*overrides, settings]), path)))
    assert choice is not None
    assert choice.said == f"checkpoint.{SAFE}"
    assert choice.settings == Settings(time_limit=900)
    other = f"+{path}.mbridge_config.ckpt_format=torch_dist"
    assert choice_of(as_dataclass(OmegaConf.select(composed(trainer, [*overrides, other]), path))) is None


def made(fresh: Fresh, override: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of VeRL's that makes the actor's checkpoint configuration; it prints whether the plug-in is there."""
    program = f"""{before}
import sys, verl
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", {[*PPO, override]!r})
omega_conf_to_dataclass(config.actor_rollout_ref.actor.checkpoint)
print(any(type(finder).__name__ == "AfterImport" for finder in sys.meta_path))
"""
    return fresh.run(program, environment)


BY_CLASS, BY_KEY = f"actor_rollout_ref.actor.{OURS}", f"+actor_rollout_ref.actor.checkpoint.{SAFE}"


def test_where_plug_ins_are_off_the_class_brings_it_and_the_key_says_nothing(fresh: Fresh) -> None:
    off = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    by_class, by_key = made(fresh, BY_CLASS, **off), made(fresh, BY_KEY, **off)
    assert (by_class.returncode, by_class.stdout.split()[-1:]) == (0, ["True"]), by_class.stderr
    assert (by_key.returncode, by_key.stdout.split()[-1:]) == (0, ["False"]), by_key.stderr


@pytest.mark.parametrize("gone", ["mbridge_fsdp_ckpt", "mbridge_fsdp_ckpt.patching"])
def test_where_it_cannot_be_imported_the_class_stops_the_run_and_the_key_says_nothing(gone: str, fresh: Fresh) -> None:
    before = f"import sys; sys.modules[{gone!r}] = None"
    by_class, by_key = (made(fresh, way, before) for way in (BY_CLASS, BY_KEY))
    assert by_class.returncode != 0
    assert "SafeCheckpointConfig" in by_class.stderr
    assert gone in by_class.stderr
    assert (by_key.returncode, by_key.stdout.split()[-1:]) == (0, ["False"]), by_key.stderr


def test_settings_can_be_overridden_too() -> None:
    actor = "+actor_rollout_ref.actor.checkpoint.mbridge_config"
    settings = [
        f"{actor}.fsdp_dtensor_safe.time_limit=900",
        f'{actor}.fsdp_dtensor_safe.allow_missing=["model.*.bias"]',
    ]
    config = composed("ppo_trainer", [*PPO, f"{actor}.ckpt_format=fsdp_dtensor_safe", *settings])
    choice = choice_of(as_dataclass(config.actor_rollout_ref.actor.checkpoint))
    assert choice is not None
    assert choice.settings == Settings(time_limit=900, allow_missing=("model.*.bias",))


def test_the_sft_trainers_plain_configuration_has_no_place_for_it() -> None:
    """Why the recipe and docs/verl.md name the class of the checkpoint configuration."""
    from hydra.errors import InstantiationException

    with pytest.raises(InstantiationException, match="mbridge_config"):
        as_dataclass(composed("sft_trainer_engine", [*SFT, f"+checkpoint.{SAFE}"]).checkpoint)


def arguments_of(script: Path, stubs: Path, *more: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run a launch script with programs that print their arguments in the place of torchrun and Python."""
    for name in ("torchrun", "python3"):
        stub = stubs / name
        stub.write_text(f"#!{os.path.realpath('/proc/self/exe')}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    inputs = {name: f"/given/{name.lower()}" for name in INPUTS if name != without}
    environment = {**os.environ, **inputs, "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}
    if without:
        environment.pop(without, None)
    return subprocess.run(
        ["bash", str(script), *more], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def recipe(name: str, stubs: Path) -> tuple[Any, list[str]]:
    """A launch script's configuration, and what is before it on the command line."""
    done = arguments_of(RECIPES[name], stubs, "trainer.project_name=mine")
    assert done.returncode == 0, done.stderr
    arguments = json.loads(done.stdout)
    module = arguments.index("-m")
    return composed(TRAINERS[arguments[module + 1]], arguments[module + 2 :]), arguments[:module]


def test_the_sft_script_is_issue_4910(tmp_path: Path) -> None:
    config, launcher = recipe("sft", tmp_path)
    assert launcher[:4] == ["--nnodes", "4", "--nproc-per-node", "8"]
    _check_engine(as_dataclass(config.engine))
    _check_optimizer(as_dataclass(config.optim))
    _check_checkpoint(as_dataclass(config.checkpoint))
    assert as_dataclass(config.engine).strategy == "megatron"
    assert config.trainer.default_local_dir == "/given/checkpoints"
    assert config.trainer.project_name == "mine"


def test_the_example_saves_and_resumes_all_in_this_format(tmp_path: Path) -> None:
    config, launcher = recipe("example", tmp_path)
    assert launcher == ["--standalone", "--nproc-per-node", "8"]
    _check_checkpoint(as_dataclass(config.checkpoint))
    assert as_dataclass(config.engine).use_megatron_fsdp
    assert as_dataclass(config.optim).use_checkpoint_opt_param_scheduler
    assert (config.trainer.resume_mode, config.trainer.default_local_dir) == ("auto", "/given/checkpoints")


def test_the_grpo_script_has_the_same_layout(tmp_path: Path) -> None:
    config, _ = recipe("grpo", tmp_path)
    actor = config.actor_rollout_ref.actor
    _check_engine(as_dataclass(actor.megatron))
    _check_optimizer(as_dataclass(actor.optim))
    _check_checkpoint(as_dataclass(actor.checkpoint))
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 32
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.CUDA_DEVICE_MAX_CONNECTIONS == "32"
    assert config.trainer.project_name == "mine"


def _check_engine(engine: Any) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    sizes = (engine.tensor_model_parallel_size, engine.context_parallel_size, engine.expert_model_parallel_size)
    assert (*sizes, engine.expert_tensor_parallel_size, engine.pipeline_model_parallel_size) == (2, 2, 8, 1, 1)
    assert engine.use_megatron_fsdp
    overrides = dict(engine.override_ddp_config)
    assert overrides == {
        "megatron_fsdp_use_decoupled_grad": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    DistributedDataParallelConfig(**overrides)


def _check_optimizer(optimizer: Any) -> None:
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    overrides = dict(optimizer.override_optimizer_config)
    assert overrides == {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }
    init_megatron_optim_config(optimizer)
    assert optimizer.use_checkpoint_opt_param_scheduler


def _check_checkpoint(checkpoint: Any) -> None:
    assert choice_of(checkpoint) is not None
    assert list(checkpoint.save_contents) == list(checkpoint.load_contents) == ["model", "optimizer", "extra"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_missing_input_is_named(name: str, tmp_path: Path) -> None:
    done = arguments_of(RECIPES[name], tmp_path, without="MODEL_PATH")
    assert done.returncode != 0
    assert "MODEL_PATH: a directory with the Hugging Face model" in done.stderr


def test_every_override_in_the_documentation_composes() -> None:
    """Each block of shell code is overrides of one trainer, one a line."""
    blocks = re.findall(r"```sh\n(.*?)```", (REPOSITORY / "docs/verl.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    assert f"\n{BY_CLASS}\n" in (REPOSITORY / "README.md").read_text()
    assert BY_CLASS in blocks[0].splitlines()
    for block in blocks:
        overrides = [word for line in block.splitlines() for word in shlex.split(line)]
        ppo = all(re.match(r"\+?(actor_rollout_ref|critic|ray_kwargs)\.", override) for override in overrides)
        composed("ppo_trainer" if ppo else "sft_trainer_engine", [*(PPO if ppo else SFT), *overrides])

"""`python -m mbridge_fsdp_ckpt.recipes`: overrides by dotted name, and runs of the recipes."""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import ConfigurationError, UnknownFormatError
from mbridge_fsdp_ckpt.recipes import overrides
from mbridge_fsdp_ckpt.recipes.__main__ import main
from mbridge_fsdp_ckpt.recipes.qwen35 import qwen35_35b_a3b
from mbridge_fsdp_ckpt.testing.kernels import replace_cuda_only_kernels
from mbridge_fsdp_ckpt.testing.ranks import RankPool, no_process_group

YAML_4910 = Path(__file__).parents[2] / "recipes" / "qwen35_35b_a3b.yaml"


class Backend(enum.Enum):
    auto = 1
    flash = 2


@dataclass
class Checkpoint:
    ckpt_format: str = "torch_dist"
    save: str | None = None
    save_interval: int = 500


@dataclass
class Model:
    backend: Backend = Backend.auto
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    fused: bool = False


@dataclass
class Config:
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    model: Model = field(default_factory=Model)
    mixed_precision: Any = "bf16_mixed"
    comm_overlap: Any = None


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 10), ("1e-3", 1e-3), ("true", True), ("null", None), ("/a/b", "/a/b"), ("[1, 2]", [1, 2]), ("a=b", "a=b")],
)
def test_values_are_yaml(text: str, value: Any) -> None:
    assert overrides.from_arguments([f"train.field={text}"]) == {"train.field": value}


@pytest.mark.parametrize("name", ["checkpoint.format", "checkpoint.ckpt_format"])
def test_the_format_has_two_names(name: str) -> None:
    assert overrides.from_arguments([f"{name}=fsdp_dtensor_safe"]) == {"checkpoint.ckpt_format": "fsdp_dtensor_safe"}


def test_both_names_must_agree() -> None:
    same = ["checkpoint.format=fsdp_dtensor_safe", "checkpoint.ckpt_format=fsdp_dtensor_safe"]
    assert len(overrides.from_arguments(same)) == 1
    with pytest.raises(ConfigurationError, match=r"checkpoint\.format=fsdp_dtensor_safe and checkpoint\.ckpt_format"):
        overrides.from_arguments([same[0], "checkpoint.ckpt_format=torch_dist"])


def test_a_misspelt_format_is_caught_at_once() -> None:
    with pytest.raises(UnknownFormatError, match="Did you mean 'fsdp_dtensor_safe'"):
        overrides.from_arguments(["checkpoint.format=fsdp_dtensor_save"])


@pytest.mark.parametrize("assignment", ["train", "=3", "train.field=[1"])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigurationError):
        overrides.from_arguments([assignment])


def test_settings_are_applied_as_their_fields_types() -> None:
    config = Config()
    settings = {"checkpoint.save": "/a", "model.backend": "flash", "model.dtype": "bfloat16", "model.dropout": 1}
    overrides.apply(config, settings)
    assert config == Config(Checkpoint(save="/a"), Model(Backend.flash, torch.bfloat16, 1))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("checkpoint.save_intervall", "Did you mean 'checkpoint.save_interval'"),
        ("chekpoint.save", "Did you mean 'checkpoint.save'"),
        ("checkpoint.fromat", "Did you mean 'checkpoint.format'"),
        ("comm_overlap.field", "Did you mean 'comm_overlap'"),
        ("checkpoint.save.deeper", "Did you mean 'checkpoint.save'"),
        ("xyz", "Settings are in checkpoint, model, mixed_precision, comm_overlap"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, suggestion: str) -> None:
    config = Config()
    with pytest.raises(ConfigurationError, match=suggestion):
        overrides.apply(config, {"checkpoint.save": "/a", name: 1})
    assert config == Config(), "nothing is changed unless all can be"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint.save_interval", "ten"),
        ("checkpoint.save_interval", True),
        ("model.fused", 1),
        ("model.backend", "falsh"),
        ("model.dtype", "float31"),
        ("model", {"fused": True}),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"\[{name}\]"):
        overrides.apply(Config(), {name: value})


def test_a_file_maps_dotted_names(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("checkpoint.format: fsdp_dtensor_safe\noptimizer.lr: 1e-3\n")
    assert overrides.from_file(file) == {"checkpoint.ckpt_format": "fsdp_dtensor_safe", "optimizer.lr": 1e-3}
    for wrong in ("- 1\n", "a: [", "checkpoint.format: a\ncheckpoint.ckpt_format: b\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigurationError):
            overrides.from_file(file)
    with pytest.raises(ConfigurationError, match="absent"):
        overrides.from_file(tmp_path / "absent.yaml")


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["qwen35_tiny", "qwen35_35b_a3b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen35_tyni"], "ConfigurationError: expected a recipe: .* Did you mean 'qwen35_tiny'"),
        (["qwen35_tiny", "checkpoint.format=fsdp_dtensor_saef"], "UnknownFormatError: .* Did you mean"),
        (["--overrides", "/absent.yaml", "qwen35_tiny"], r"ConfigurationError: \[/absent.yaml\]"),
    ],
)
def test_an_error_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert re.match(message, printed)
    assert "Traceback" not in printed


@no_process_group
def train(*arguments: str) -> int:
    replace_cuda_only_kernels()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    return main(["qwen35_tiny", "dist.distributed_backend=gloo", "checkpoint.format=fsdp_dtensor_safe", *arguments])


@pytest.mark.bridge
def test_the_tiny_recipe_trains_saves_and_resumes(bridge_ranks: RankPool, tmp_path: Path) -> None:
    kept = [f"checkpoint.save={tmp_path}", f"checkpoint.load={tmp_path}", "checkpoint.save_interval=1"]
    assert bridge_ranks.run(train, *kept, "train.train_iters=2", ranks=2) == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    second = (tmp_path / "iter_0000002").stat().st_mtime_ns
    assert bridge_ranks.run(train, *kept, "train.train_iters=3", ranks=2) == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (tmp_path / "iter_0000002").stat().st_mtime_ns == second, "resumed after it, not from the start"


@no_process_group
def settings_of_4910() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    from operator import attrgetter

    from megatron.bridge.training.config import runtime_config_update

    os.environ |= {"HF_HUB_OFFLINE": "1", "WORLD_SIZE": "32"}
    mbridge_fsdp_ckpt.register()
    config = qwen35_35b_a3b()
    written = overrides.from_file(YAML_4910)
    found = {name: attrgetter(name)(config) for name in written}
    overrides.apply(config, written)
    runtime_config_update(config)  # Bridge's own checks, as pretrain() begins with them
    assert config.data_parallel_size == 8
    names = ("num_layers", "hidden_size", "num_moe_experts", "moe_router_topk", "vocab_size", "rotary_base")
    return written, found, {name: getattr(config.model, name) for name in names}


@pytest.mark.bridge
def test_the_recipe_of_issue_4910_is_made_without_network(bridge_ranks: RankPool) -> None:
    [(written, found, model)] = bridge_ranks.run(settings_of_4910, ranks=1)
    assert found == written, "recipes/qwen35_35b_a3b.yaml says what the recipe does"
    assert model == {
        "num_layers": 40,
        "hidden_size": 2048,
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "vocab_size": 248320,
        "rotary_base": 10_000_000,
    }

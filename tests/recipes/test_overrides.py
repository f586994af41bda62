# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Overrides by dotted name: what they may set, and what is said of those that are wrong."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError, UnknownFormatError
from recipes import overrides


class Backend(enum.Enum):
    auto = 1
    flash = 2


@dataclass
class Checkpoint:
    ckpt_format: Literal["torch_dist", "fsdp_dtensor"] = "torch_dist"  # Bridge does not list ours
    save: str | None = None
    save_interval: int = 500
    keep: int | None = None


@dataclass
class Model:
    backend: Backend = Backend.auto
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    fused: bool = False
    recompute: Literal["full", "selective"] | None = None
    window: tuple[int, int] | None = None
    pattern: int | list[int] = 1
    data: Path | None = None


@dataclass
class Sharding:
    data_parallel_sharding_strategy: str = "optim"


@dataclass
class Config:
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    model: Model = field(default_factory=Model)
    ddp: Sharding = field(default_factory=Sharding)
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


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("checkpoint.save", "/a", "/a"),
        ("checkpoint.save", None, None),
        ("checkpoint.keep", 3, 3),
        ("checkpoint.save_interval", 1e3, 1000),
        ("checkpoint.ckpt_format", "fsdp_dtensor_safe", "fsdp_dtensor_safe"),
        ("model.backend", "flash", Backend.flash),
        ("model.dtype", "bfloat16", torch.bfloat16),
        ("model.dtype", "torch.bfloat16", torch.bfloat16),
        ("model.dropout", 1, 1.0),
        ("model.recompute", "full", "full"),
        ("model.recompute", None, None),
        ("model.window", [1, 2], (1, 2)),
        ("model.pattern", [1, 0], [1, 0]),
        ("model.data", "/a", Path("/a")),
        ("ddp.data_parallel_sharding_strategy", "optim_grads", "optim_grads"),
        ("mixed_precision", "fp16", "fp16"),
        ("comm_overlap", "anything", "anything"),
    ],
)
def test_a_setting_is_applied_as_its_fields_type(name: str, value: Any, expected: Any) -> None:
    config = Config()
    overrides.apply(config, {name: value})
    found = attrgetter(name)(config)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("checkpoint.save_intervall", "Did you mean 'checkpoint.save_interval'"),
        ("chekpoint.save", "Did you mean 'checkpoint.save'"),
        ("checkpoint.fromat", "Did you mean 'checkpoint.format'"),
        ("comm_overlap.field", "Did you mean 'comm_overlap'"),
        ("checkpoint.save.deeper", "Did you mean 'checkpoint.save'"),
        ("xyz", "Settings are in checkpoint, model, ddp, mixed_precision, comm_overlap"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, suggestion: str) -> None:
    config = Config()
    with pytest.raises(ConfigurationError, match=suggestion):
        overrides.apply(config, {"checkpoint.save": "/a", name: 1})
    assert config == Config(), "nothing is changed unless all can be"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("checkpoint.save_interval", "ten", "expected an integer; found 'ten'. Its value in the recipe is 500"),
        ("checkpoint.save_interval", True, "expected an integer"),
        ("checkpoint.save_interval", 2.5, "expected an integer"),
        ("checkpoint.save_interval", None, "expected an integer"),
        ("checkpoint.keep", "three", "expected an integer or null"),
        ("checkpoint.save", 3, "expected text or null"),
        ("model.dropout", "none", "expected a number"),
        ("model.fused", 1, "expected one of true, false"),
        ("model.fused", "ture", "Did you mean true"),
        ("model.backend", "falsh", "expected one of auto, flash; found 'falsh'. Did you mean flash"),
        ("model.dtype", "bfloat61", "Did you mean bfloat16"),
        ("model.recompute", "ful", "expected one of full, selective; found 'ful'. Did you mean full"),
        ("model.window", 3, "expected tuple or null"),
        ("model.window", [1], "expected tuple or null"),
        ("model.window", [1, "2"], "expected tuple or null"),
        ("model.pattern", [1, 0.5], "expected an integer or list"),
        ("model.pattern", "1", "expected an integer or list"),
        ("ddp.data_parallel_sharding_strategy", "optim_grad", "Did you mean optim_grads"),
        ("model", {"fused": True}, "Name one of its settings: model.backend"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused(name: str, value: Any, said: str) -> None:
    config = Config()
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        overrides.apply(config, {"checkpoint.save": "/a", name: value})
    assert f"[{name}]" in str(caught.value)
    assert config == Config(), "nothing is changed unless all can be"


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

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`python -m recipes`: what it says of a wrong command line, and how it ends."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import ConfigurationError
from recipes import __main__ as launcher
from recipes.__main__ import main
from recipes.catalog import FULL, RECIPES, find
from recipes.tiny import shortest_run_of_all_kinds


def model(tensor: int = 1, context: int = 1, expert: int = 1, expert_tensor: int = 1) -> Any:
    return SimpleNamespace(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FULL)
    assert last.startswith("each also as NAME_tiny")
    assert all(len(line) <= 80 for line in (*lines, last))


def test_every_recipe_has_a_tiny_variant() -> None:
    assert sorted(RECIPES) == sorted([*FULL, *(f"{name}_tiny" for name in FULL)])
    assert all(recipe.name == name for name, recipe in RECIPES.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3_8b_pretrian"], "ConfigurationError: expected a recipe: .* Did you mean 'qwen3_8b_pretrain'"),
        (["qwen3_8"], "ConfigurationError: expected a recipe: .* Did you mean 'qwen3_8b_pretrain'"),
        (["nothing_like_it"], "ConfigurationError: expected a recipe: .* --list"),
        (["qwen3_8b_pretrain", "checkpoint.format=fsdp_dtensor_saef"], "UnknownFormatError: .* Did you mean"),
        (["qwen3_8b_pretrain", "train.train_iters"], "ConfigurationError: expected each override to be key=value"),
        (["--overrides", "/absent.yaml", "qwen3_8b_pretrain"], r"ConfigurationError: \[/absent.yaml\]"),
    ],
)
def test_an_error_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert re.match(message, printed)
    assert "Traceback" not in printed


def test_what_needs_no_training_imports_no_torch() -> None:
    code = "from recipes.__main__ import *; main(['--list']); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "False"


def test_a_recipe_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--list" in capsys.readouterr().err


def test_an_error_that_all_ranks_meet_is_said_once_a_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert main(["nothing_like_it"]) == 2
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_the_run_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "_train", interrupted)
    assert main(["qwen3_8b_pretrain"]) == 130
    assert re.fullmatch("interrupted; .* resumes from its last checkpoint\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("sizes", "least"),
    [({}, 1), ({"tensor": 2}, 2), ({"tensor": 2, "context": 2, "expert": 8}, 8), ({"tensor": 3, "expert": 2}, 6)],
)
def test_the_fewest_ranks_hold_tensor_context_and_expert_parallelism(sizes: dict[str, int], least: int) -> None:
    assert launcher.fewest_ranks(model(**sizes)) == least
    assert least == math.lcm(sizes.get("tensor", 1) * sizes.get("context", 1), sizes.get("expert", 1))


def test_a_forgotten_torchrun_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError) as caught:
        launcher.check_ranks(find("qwen35_35b_a3b_pretrain_tiny"), model(2, 2, 2))
    said = str(caught.value)
    assert "expected 4 ranks, or a multiple" in said
    assert "found 1, not started by torchrun" in said
    assert "`torchrun --nproc-per-node 4 -m recipes qwen35_35b_a3b_pretrain_tiny ...`" in said


def test_a_wrong_number_of_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "24")
    launcher.check_ranks(find("qwen3_8b_pretrain"), model(2, 2, 8))
    with pytest.raises(ConfigurationError) as caught:
        launcher.check_ranks(find("qwen3_8b_pretrain"), model(2, 1, 16))
    assert "found 24. Run `torchrun --nnodes 2 ... --nproc-per-node 8 -m" in str(caught.value)


def test_fine_tuning_asks_for_what_only_the_user_knows(tmp_path: Path) -> None:
    recipe = find("qwen35_35b_a3b_sft")
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(pretrained_checkpoint=None),
        dataset=SimpleNamespace(dataset_root=None),
        tokenizer=SimpleNamespace(tokenizer_model=None),
    )

    def said() -> str:
        with pytest.raises(ConfigurationError) as caught:
            launcher.check_complete(recipe, config)
        return str(caught.value)

    assert "Give checkpoint.pretrained_checkpoint=DIRECTORY" in said()
    config.checkpoint.pretrained_checkpoint = str(tmp_path / "absent")
    assert "Give dataset.dataset_root=DIRECTORY" in said()
    config.dataset.dataset_root = str(tmp_path)
    assert "Give tokenizer.tokenizer_model=DIRECTORY" in said()
    config.tokenizer.tokenizer_model = str(tmp_path)
    assert f"found no {tmp_path / 'absent'}" in said()
    config.checkpoint.pretrained_checkpoint = str(tmp_path)
    assert f"found no {tmp_path / 'training.jsonl'}" in said()
    (tmp_path / "training.jsonl").touch()
    launcher.check_complete(recipe, config)
    launcher.check_complete(find("qwen3_8b_pretrain"), SimpleNamespace())


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("MEMEM*EMEME", (3, 6)),
        ([1, 1, 1, 0, 1, 1, 1, 0], (2, 4)),
        ("---", (0, 1)),
        ("ABBBBA", (0, 2)),
        ("ABBBBC", (0, 6)),
    ],
)
def test_the_shortest_run_of_layers_has_every_kind(kinds: Any, run: tuple[int, int]) -> None:
    assert shortest_run_of_all_kinds(kinds) == run

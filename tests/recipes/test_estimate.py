# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Recipes and Hugging Face configurations estimated: at full size on paper, and in small on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.tools.command import console
from mbridge_fsdp_ckpt.tools.command import estimate as command
from mbridge_fsdp_ckpt.tools.estimate.estimate import estimate
from mbridge_fsdp_ckpt.tools.estimate.job import describe
from recipes.catalog import FULL
from testing import small_job
from testing.ranks import RankPool, no_process_group
from tests.soak import sampling

pytestmark = pytest.mark.bridge

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def place(name: str) -> str:
    """A recipe as the command takes it."""
    function = FULL[name].function
    return f"{function.__module__}:{function.__name__}"


GROUPS_HELD_BY_SOME = "qwen35_35b_a3b_pretrain"
"""Some ranks hold nothing of a param group, and lack FusedAdam's step counter of it; elsewhere they hold something."""


@pytest.mark.parametrize(
    "name", sorted({GROUPS_HELD_BY_SOME, *sampling.drawn("recipes in small", list(FULL), share=7)})
)
def test_a_recipe_in_small(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    asked = {
        "model": place(name),
        "ranks": 4,
        "layout": {"world": FULL[name].gpus},
        "kept": {"optimizer": "fused", "offload": 0.0},
    }
    _check(small_job.run_small(bridge_ranks, asked, tmp_path))


def test_a_configuration_in_small(bridge_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    layout = {"world": 64, "instances": 2, "strategy": "optim"}
    asked = {"model": str(tmp_path), "ranks": 2, "layout": layout, "kept": {"optimizer": "torch"}}
    _check(small_job.run_small(bridge_ranks, asked, tmp_path))


def _check(found: dict[str, Any]) -> None:
    assert [found[name] for name in ("as_estimated", "load_is_identical", "resharded_load_is_identical")] == [True] * 3
    assert found["bytes"] > 0
    assert found["blocks"] > 0


@no_process_group
def on_paper() -> dict[str, Any]:
    layout = {"world": 1024, "tensor": 4, "instances": 2}
    found = estimate(describe(place("qwen3_8b_pretrain"), layout, {"optimizer": "fused"}).job())
    tally = found.tally
    return {
        "bytes": int(tally.bytes.sum()),
        "chunks": int(tally.chunks.sum()),
        "keys": int(tally.keys.sum()),
        "by part": sum(int(sizes.sum()) for sizes in tally.by_part.values()),
        "held": int(tally.held_bytes.sum()),
        "planned": sorted(found.plans),
    }


def test_many_ranks_write_a_model_once(bridge_ranks: RankPool) -> None:
    found = bridge_ranks.run(on_paper, ranks=1)[0]
    elements = 8_190_735_360  # Qwen3-8B, its vocabulary padded
    around = found["bytes"] - 12 * elements
    assert 800 < around / found["chunks"] < 2000, "what torch.save writes around a chunk"
    assert found["by part"] == found["bytes"]
    assert found["held"] > 2 * found["bytes"], "two instances hold it, and norms are everywhere"
    assert found["keys"] == 3 * (36 * 9 + 3), "a weight and two moments"
    assert found["planned"] == [0, 511, 1023]


@no_process_group
def refused(contents: list[str], folder: str) -> list[str]:
    said = []
    for content in contents:
        (Path(folder) / "config.json").write_text(content)
        try:
            describe(folder, {"world": 2}, {})
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_a_configuration_that_nobody_knows_is_a_named_error(bridge_ranks: RankPool, tmp_path: Path) -> None:
    unknown = ["", "[]", "{", "{}", '{"model_type": "nobody"}', '{"architectures": ["Nobody"]}']
    foreign = json.dumps({**LLAMA, "auto_map": {"AutoConfig": "code.Config"}, "model_type": "nobody"})
    said = bridge_ranks.run(refused, [*unknown, foreign], str(tmp_path), ranks=1)[0]
    assert len(said) == len(unknown) + 1
    assert all(str(tmp_path) in text and len(text.splitlines()) == 1 for text in said)


def test_experts_that_expert_parallelism_does_not_divide_are_named(bridge_ranks: RankPool) -> None:
    said = bridge_ranks.run(misfit, ranks=1)[0]
    assert "divides the model's experts, not --ep 3; found 128 experts" in said[0]
    assert "not --ep 2; found a model without experts" in said[1]


@no_process_group
def misfit() -> list[str]:
    said = []
    for name, expert in (("qwen3_30b_a3b_pretrain", 3), ("qwen3_8b_pretrain", 2)):
        with pytest.raises(ConfigurationError) as caught:
            describe(place(name), {"world": 24, "tensor": 1, "expert": expert}, {}).job()
        said.append(str(caught.value))
    return said


@no_process_group
def commanded(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(console.app, [command.estimate.__name__, *arguments], env={"COLUMNS": "80"})
    return found.exit_code, found.stdout, found.stderr


def test_the_command_prints_a_table_json_and_a_picture(bridge_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    picture = tmp_path / "ranks.png"
    job = (str(tmp_path / "config.json"), "--world", "64", "--tp", "2", "--to", "world=8,tp=1")
    code, shown, _ = bridge_ranks.run(commanded, *job, "--picture", str(picture), ranks=1)[0]
    assert code == 0
    table = shown.replace(str(tmp_path), "")  # a path is never broken
    assert all(len(line) <= 80 for line in table.splitlines()), shown
    assert "\x1b" not in shown
    assert "64 ranks, TP 2, optim_grads_params" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, printed, _ = bridge_ranks.run(commanded, *job, "--json", ranks=1)[0]
    assert code == 0
    found = json.loads(printed)
    assert sum(found["ranks"]["bytes"]) == found["total"]["bytes"] == sum(found["bytes_by_part"].values()) > 0
    assert len(found["ranks"]["bytes"]) == 64
    assert found["seconds"]["save"] > found["seconds"]["planning"]
    assert found["elsewhere"]["read_over_held"] >= 1
    assert found["elsewhere"]["layout"]["world"] == 8


def test_moments_of_other_precision_are_not_offloaded_in_part(bridge_ranks: RankPool) -> None:
    job = (place("qwen3_8b_pretrain"), "--world", "8", "--moments", "bfloat16", "--offload", "0.5")
    code, shown, said = bridge_ranks.run(commanded, *job, ranks=1)[0]
    assert (code, shown) == (2, "")
    assert "Estimate --offload 0 and --offload 1" in said

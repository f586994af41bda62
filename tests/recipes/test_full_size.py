# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The full-size recipes on paper: the published models, for their number of GPUs, in configurations Bridge accepts."""

from __future__ import annotations

import os
import re
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import mbridge_fsdp_ckpt
from recipes import overrides, published
from recipes.__main__ import _parser, check_ranks, fewest_ranks
from recipes.catalog import FULL, find
from recipes.settings import REQUIRED
from testing.ranks import RankPool, no_process_group
from tests.recipes import parameters

pytestmark = pytest.mark.bridge

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "recipes.md", ROOT / "recipes" / "README.md")

BILLIONS = {
    "qwen35_35b_a3b_pretrain": (35.0, 3.0),
    "qwen35_35b_a3b_sft": (35.0, 3.0),
    "qwen35_397b_a17b_pretrain": (397.0, 17.0),
    "qwen3_30b_a3b_pretrain": (30.5, 3.3),
    "qwen3_next_80b_a3b_pretrain": (80.0, 3.0),
    "qwen3_8b_pretrain": (8.2, 8.2),
    "nemotron_3_nano_pretrain": (31.6, 3.6),
}
"""Parameters in all, and those that a token meets, as the publishers state them, rounded."""

MODELS = {
    "qwen35_35b_a3b_pretrain": published.QWEN35_35B_A3B,
    "qwen35_35b_a3b_sft": published.QWEN35_35B_A3B,
    "qwen35_397b_a17b_pretrain": published.QWEN35_397B_A17B,
    "qwen3_30b_a3b_pretrain": published.QWEN3_30B_A3B,
    "qwen3_next_80b_a3b_pretrain": published.QWEN3_NEXT_80B_A3B,
    "qwen3_8b_pretrain": published.QWEN3_8B,
    "nemotron_3_nano_pretrain": published.NEMOTRON_3_NANO,
}


@no_process_group
def on_paper() -> dict[str, dict[str, Any]]:
    """What is found of each recipe, with the settings of its file, before and after Bridge's own checks."""
    import torch
    import transformers
    from megatron.bridge.training.config import runtime_config_update

    os.environ["HF_HUB_OFFLINE"] = "1"
    mbridge_fsdp_ckpt.register()
    found = {}
    for name, recipe in FULL.items():
        os.environ |= {"WORLD_SIZE": str(recipe.gpus), "RANK": "0"}
        config = recipe.make()
        written = overrides.from_file(ROOT / "recipes" / f"{name}.yaml")
        made = {setting: attrgetter(setting)(config) for setting in written}
        overrides.apply(config, written | dict.fromkeys(REQUIRED, str(ROOT)) if recipe.finetunes else written)
        check_ranks(recipe, config.model)
        embeddings = 2 * config.model.vocab_size * config.model.hidden_size
        counted = parameters.count(config.model), parameters.active(config.model), embeddings
        least = fewest_ranks(config.model)
        runtime_config_update(config)
        with torch.device("meta"):
            reference = getattr(transformers, MODELS[name].architecture)(MODELS[name].hugging_face())
        found[name] = {
            "written": written,
            "made": made,
            "counted": counted,
            "reference": sum(parameter.numel() for parameter in reference.parameters()),
            "data parallel": config.data_parallel_size,
            "least": least,
            "manager": config.checkpoint.custom_manager_class,
            "layout": tuple(
                getattr(config.model, f"{kind}_model_parallel_size" if kind != "context" else "context_parallel_size")
                for kind in ("tensor", "context", "expert")
            ),
            "offload": config.optimizer.optimizer_offload_fraction,
        }
    return found


@pytest.fixture(scope="module")
def found(bridge_ranks: RankPool) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = bridge_ranks.run(on_paper, ranks=1)[0]
    return result


@pytest.mark.parametrize("name", FULL)
def test_the_model_is_the_published_one(name: str, found: dict[str, dict[str, Any]]) -> None:
    total, active, embeddings = found[name]["counted"]
    assert total == found[name]["reference"], "transformers makes another model of the published configuration"
    stated, stated_active = BILLIONS[name]
    assert total / 1e9 == pytest.approx(stated, rel=0.02)
    assert (active - embeddings) / 1e9 < stated_active * 1.1, "publishers count embeddings, or do not"
    assert stated_active < active / 1e9 * 1.1


@pytest.mark.parametrize("name", FULL)
def test_bridge_accepts_it_at_its_number_of_gpus(name: str, found: dict[str, dict[str, Any]]) -> None:
    tensor, context, _ = found[name]["layout"]
    assert found[name]["data parallel"] == FULL[name].gpus // (tensor * context)
    assert FULL[name].gpus % found[name]["least"] == 0
    assert found[name]["manager"] == "mbridge_fsdp_ckpt.integrations.bridge.manager.SafeCheckpointManager"


@pytest.mark.parametrize("name", FULL)
def test_its_file_says_what_it_does(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["written"] == found[name]["made"]


def test_issue_4910_is_laid_out_as_reported(found: dict[str, dict[str, Any]]) -> None:
    for name in ("qwen35_35b_a3b_pretrain", "qwen35_35b_a3b_sft"):
        assert FULL[name].gpus == 32
        assert found[name]["layout"] == (2, 2, 8)
        assert found[name]["offload"] == 1.0
        for setting in ("optimizer.use_precision_aware_optimizer", "ddp.megatron_fsdp_use_decoupled_grad"):
            assert found[name]["made"][setting] is True


@no_process_group
def nemotron_by_bridge() -> dict[str, tuple[Any, Any]]:
    """Fields of the architecture in our description and in that which Bridge's recipe writes out."""
    from megatron.bridge.recipes.nemotronh.nemotron_3_nano import nemotron_3_nano_pretrain_config

    bridge, ours = nemotron_3_nano_pretrain_config().model, published.NEMOTRON_3_NANO.provider()
    names = [name for name in vars(bridge) if name.startswith(("mamba_", "moe_router_topk", "num_", "hybrid_layer"))]
    names += ["hidden_size", "ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size", "activation_func"]
    names += ["moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_enable_expert_bias"]
    return {name: (str(getattr(ours, name)), str(getattr(bridge, name))) for name in names}


def test_nemotron_is_as_bridge_writes_it_out(bridge_ranks: RankPool) -> None:
    compared = bridge_ranks.run(nemotron_by_bridge, ranks=1)[0]
    assert len(compared) > 10
    assert {name: pair for name, pair in compared.items() if pair[0].split(" at ")[0] != pair[1].split(" at ")[0]} == {}


def test_every_file_belongs_to_a_recipe() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} == set(FULL)


def test_the_page_lists_every_recipe(found: dict[str, dict[str, Any]]) -> None:
    rows = re.findall(
        r"^\| `(.*)` \| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", PAGES[0].read_text(), re.MULTILINE
    )
    expected = []
    for name, recipe in FULL.items():
        total, active, _ = (f"{number / 1e9:.1f} B" for number in found[name]["counted"])
        place = "hosts" if found[name]["offload"] else "GPUs"
        sizes = map(str, (recipe.gpus, *found[name]["layout"]))
        expected.append((name, *sizes, place, total if total == active else f"{total} ({active})"))
    assert rows == expected


def documented() -> list[list[str]]:
    commands = []
    for page in (*PAGES, *sorted((ROOT / "recipes").glob("*.yaml"))):
        text = re.sub(r"\\\n#?\s*", "", page.read_text())
        commands += [shlex.split(line) for line in re.findall(r"^#?\s+((?:torchrun|python) .*recipes.*)$", text, re.M)]
    return commands


def test_documented_commands_start_a_recipe_on_the_ranks_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [command for command in documented() if command[0] == "torchrun"]
    assert len(commands) > len(FULL)
    for command in commands:
        own = command[command.index("recipes") + 1 :]
        given = _parser().parse_intermixed_args(own)
        recipe = find(given.recipe)
        if given.overrides is not None:
            assert overrides.from_file(given.overrides), command
        overrides.from_arguments(given.assignments)
        nodes = int(command[command.index("--nnodes") + 1]) if "--nnodes" in command else 1
        ranks = nodes * int(command[command.index("--nproc-per-node") + 1])
        assert ranks == (4 if recipe.tiny else recipe.gpus), command

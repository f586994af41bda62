# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Real Megatron-FSDP on CPU ranks: saved in one layout, loaded in another, bit for bit; no collectives.

Every parameter kind of a Qwen3.5-shaped model: Gated DeltaNet with biases, attention, routed and shared experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testing.models import Recipe
from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import cases, oracle
from tests.soak import sampling

QWEN = Recipe(layers=3, experts=4, gated_delta_net=True)
DENSE = Recipe(layers=2, bias=True)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "2 ranks, TP 2": (2, {"tensor": 2}),
    "4 ranks, TP 2": (4, {"tensor": 2}),
    "2 ranks, EP 2": (2, {"expert": 2}),
    "2 ranks, TP 2, EP 2": (2, {"tensor": 2, "expert": 2}),
    "4 ranks, EP 2": (4, {"expert": 2}),
    "4 ranks, TP 2, EP 2": (4, {"tensor": 2, "expert": 2}),
}


@pytest.mark.parametrize("saved_in", ["2 ranks", "4 ranks, TP 2, EP 2"])
def test_a_checkpoint_loads_in_every_other_layout(saved_in: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[saved_in]
    first = tmp_path / "first"
    saved = megatron_ranks.run(cases.train_and_save, str(first), QWEN.on(**layout), ranks=ranks)[0]
    held = {key: value for key, value in oracle.on_disk(first).items() if not key.endswith(".step")}
    assert held == saved["live"]
    assert saved["collectives"] == {}
    fused = (
        "conv1d.weight.query",
        "conv1d.bias.value",
        "in_proj.weight.alpha",
        "in_proj.bias.z",
        "linear_fc1.weight_v",
    )
    assert all(any(f".{name}" in key for key in held) for name in fused)
    for name in sampling.drawn(f"layouts after {saved_in}", list(LAYOUTS), share=4):
        other_ranks, other = LAYOUTS[name]
        again = tmp_path / name.replace(" ", "-")
        loaded = megatron_ranks.run(cases.load_and_save, str(first), str(again), QWEN.on(**other), ranks=other_ranks)[0]
        assert loaded["live"] == saved["live"], name
        assert oracle.on_disk(again) == oracle.on_disk(first), name


def test_shards_are_read_from_each_parameter_and_may_be_cut_by_another_rule(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    """As Megatron-Core 0.20 has them: experts sharded otherwise than the rest, groups split at other rows."""
    first, whole, again = (tmp_path / name for name in ("first", "whole", "again"))
    recipe = QWEN.on(expert=2)
    megatron_ranks.run(cases.train_and_save, str(first), recipe, ranks=2)
    experts = megatron_ranks.run(cases.save_with_whole_experts, str(whole), recipe, ranks=2)
    assert len(experts[0]) > 10
    assert oracle.on_disk(whole) == oracle.on_disk(first)
    cut = megatron_ranks.run(cases.load_and_save_cut_otherwise, str(first), str(again), recipe, ranks=2)
    assert all(before != after for before, after in cut)
    assert oracle.on_disk(again) == oracle.on_disk(first)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch Adam": {"optimizer": "torch"},
    "FusedAdam": {"optimizer": "auto"},
    "FusedAdam, bf16 moments": {
        "optimizer": "auto",
        "optimizer_settings": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
        "ddp": {"megatron_fsdp_use_decoupled_grad": True},
    },
    "offload 1.0": {"offload": 1.0},
    "offload 0.5": {"offload": 0.5},
    "offload 0.3, overlap": {"offload": 0.3, "optimizer_settings": {"overlap_cpu_optimizer_d2h_h2d": True}},
    "offload 0.5 over FusedAdam": {"offload": 0.5, "optimizer": "auto"},
    "offload 1.0, decoupled grads": {
        "offload": 1.0,
        "optimizer_settings": {"use_precision_aware_optimizer": True, "overlap_cpu_optimizer_d2h_h2d": True},
        "ddp": {"megatron_fsdp_use_decoupled_grad": True},
    },
}


needs_engine = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")


def optimizers(names: list[str]) -> list[Any]:
    """Cases: Megatron takes torch's Adam, without a word, where it finds no FusedAdam."""
    return [pytest.param(name, marks=[needs_engine] if "FusedAdam" in name else []) for name in names]


@pytest.mark.parametrize("name", optimizers(sampling.drawn("optimizers", list(OPTIMIZERS), share=2)))
def test_training_goes_on_bit_for_bit(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    recipe = QWEN.on(**OPTIMIZERS[name])
    through = megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), recipe, more_steps=2, ranks=2)
    resumed = megatron_ranks.run(cases.load_and_save, str(tmp_path / "c"), "", recipe, more_steps=2, ranks=2)
    for one, other in zip(through, resumed, strict=True):
        assert other["live"] == one["live"]
        assert other["losses"] == one["losses"]
        assert other["end"] == one["end"]
    assert any(".exp_avg_sq" in key for key in through[0]["live"])


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "no_shard": (2, {"strategy": "no_shard"}),
    "optim": (2, {"strategy": "optim"}),
    "optim_grads": (2, {"strategy": "optim_grads"}),
    "hybrid, outer replicated": (4, {"instances": 2}),
    "hybrid, outer sharded": (4, {"instances": 2, "outer": "optim"}),
}


@pytest.mark.parametrize("name", sampling.drawn("strategies", list(STRATEGIES), share=2))
def test_every_sharding_strategy(name: str, megatron_ranks: RankPool, tmp_path: Path) -> None:
    ranks, layout = STRATEGIES[name]
    recipe, first = QWEN.on(**layout), str(tmp_path / "first")
    through = megatron_ranks.run(cases.train_and_save, first, recipe, more_steps=1, ranks=ranks)
    resumed = megatron_ranks.run(cases.load_and_save, first, "", recipe, more_steps=1, ranks=ranks)
    assert [r["losses"] for r in resumed] == [r["losses"] for r in through]
    assert resumed[0]["end"] == through[0]["end"]
    other = megatron_ranks.run(cases.load_and_save, first, str(tmp_path / "second"), QWEN.on(tensor=2), ranks=2)[0]
    assert other["live"] == through[0]["live"]
    assert oracle.on_disk(tmp_path / "second") == oracle.on_disk(first)


SAME: list[dict[str, Any]] = [{}, {"expert": 2, "offload": 0.5}, {"tensor": 2}, {"instances": 2}]


@pytest.mark.parametrize("layout", sampling.drawn("same layouts", SAME, share=2), ids=str)
def test_the_same_layout_reads_what_its_ranks_wrote(
    layout: dict[str, Any], megatron_ranks: RankPool, tmp_path: Path
) -> None:
    """A shard has nothing of some parameters, and numbers of all others, whichever rank has their first element."""
    recipe = QWEN.on(**layout)
    saved = megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), recipe, ranks=4)[0]["live"]
    loaded = megatron_ranks.run(cases.load_counting, str(tmp_path / "c"), recipe, ranks=4)
    assert [rank["prefixes"] for rank in loaded] == [["group_00000.index"], [], [], []], (
        "of keys that somebody must ask for"
    )
    assert not any(rank["rows"] for rank in loaded)
    assert loaded[0]["live"] == saved


def test_biases_of_gated_layers(megatron_ranks: RankPool, tmp_path: Path) -> None:
    saved = megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), DENSE.on(tensor=2), ranks=4)[0]
    assert "model.module.decoder.layers.0.mlp.linear_fc1.bias_w" in saved["live"]
    for ranks in (1, 2, 4):
        loaded = megatron_ranks.run(cases.load_counting, str(tmp_path / "c"), DENSE, ranks=ranks)
        assert loaded[0]["live"] == saved["live"]
        assert [rank["prefixes"] for rank in loaded] == [["group_00000.index"]] * ranks


FRACTIONS = [("offload 1.0", "offload 0.5"), ("offload 0.5", "torch Adam")]
"""Among all pairs of optimizers: tests/soak/test_optimizers.py."""


@pytest.mark.parametrize(("saved_with", "loaded_with"), sampling.drawn("fractions", FRACTIONS, share=2))
def test_the_offload_fraction_may_change(
    saved_with: str, loaded_with: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    one, other = QWEN.on(**OPTIMIZERS[saved_with]), QWEN.on(**OPTIMIZERS[loaded_with])
    saved = megatron_ranks.run(cases.train_and_save, str(tmp_path / "c"), one, more_steps=2, ranks=2)[0]
    loaded = megatron_ranks.run(cases.load_and_save, str(tmp_path / "c"), "", other, more_steps=2, ranks=2)[0]
    assert loaded["live"] == saved["live"]
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-3)

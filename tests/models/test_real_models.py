# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Models of many families, imported from Hugging Face by Bridge: saved in one layout, loaded in others, bit for bit.

Qwen3.5-MoE, 4 ranks, TP 2, EP 2  -> save ->  1 rank; TP 4; EP 4; no_shard; ...: each must be Bridge's own import there

The modules are Transformer Engine's own; nothing runs forward, for that needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import oracle
from tests.families.reference import Layout
from tests.models import hugging_face, imported
from tests.soak import sampling

pytestmark = pytest.mark.bridge

EXPERT_MODELS = ("Qwen3.5-MoE", "Qwen3-Next", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "Mixtral", "Nemotron-H")
DENSE_MODELS = ("Qwen3.5", "Qwen3")
VISION_MODELS = ("Qwen3-VL", "Qwen3.5-VL-MoE")
NAMES = (*EXPERT_MODELS, *DENSE_MODELS, *VISION_MODELS)
NOT_IN_BRIDGE = {"Mixtral": "Megatron-Bridge 0.6.2 has no bridge for MixtralForCausalLM"}

LAYOUTS = {
    "1 rank": Layout(1),
    "TP 4": Layout(4, tensor=4),
    "EP 4, optim": Layout(4, expert=4, strategy="optim"),
    "TP 2, no_shard": Layout(2, tensor=2, strategy="no_shard"),
    "EP 2, optim_grads": Layout(2, expert=2, strategy="optim_grads"),
    "TP 2, hybrid, outer replicated": Layout(4, tensor=2, instances=2),
    "EP 2, hybrid, outer sharded": Layout(4, expert=2, instances=2, outer="optim"),
    "TP 2, CP 2": Layout(4, tensor=2, context=2),
    "TP 2, EP 2, expert TP 2": Layout(4, tensor=2, expert=2, expert_tensor=2),
}
SAVED_IN = Layout(4, tensor=2, expert=2)


@dataclass(frozen=True)
class Saved:
    """A Hugging Face checkpoint, and ours of its import.

    Args:
        tensors: What torch reads in ours.
    """

    source: Path
    checkpoint: Path
    tensors: oracle.Digests


@pytest.fixture(scope="module")
def saved(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Saves a model when it is first asked for."""
    known: dict[str, Saved | None] = {}

    def save(name: str) -> Saved:
        if name not in known:
            directory = tmp_path_factory.mktemp("model")
            known[name] = _save(name, directory / "hugging_face", directory / "checkpoint", bridge_ranks)
        model = known[name]
        if model is None:
            pytest.skip(not_in_bridge(name))
        assert name not in NOT_IN_BRIDGE, "Bridge has learnt this model: take it off the list"
        return model

    return save


def not_in_bridge(name: str) -> str:
    """Why a model is skipped that `imported.is_supported` denies."""
    return NOT_IN_BRIDGE.get(name, "Megatron-Bridge 0.5 looks for its experts under other names than transformers'")


def _save(name: str, source: Path, checkpoint: Path, ranks: RankPool) -> Saved | None:
    ranks.run(hugging_face.write, name, str(source), ranks=1)
    if not ranks.run(imported.is_supported, str(source), ranks=1)[0]:
        return None
    layout = of(SAVED_IN, name)
    counts = ranks.run(imported.save_imported, str(source), str(checkpoint), layout, ranks=layout.ranks)
    assert all(count > 0 for count in counts)
    tensors = oracle.on_disk(checkpoint)
    assert any(key.startswith("optimizer.state.") for key in tensors)
    return Saved(source, checkpoint, tensors)


def of(layout: Layout, model: str) -> Layout:
    """The layout, without expert parallelism where there are no experts."""
    return layout if hugging_face.MODELS[model].has_experts else layout.on(expert=1, expert_tensor=1)


def drawn() -> list[tuple[str, str]]:
    """Models with layouts: all, or a third of the models, each in a third of the layouts."""
    models = sampling.drawn("models", NAMES, share=3)
    layouts = {model: sampling.drawn(f"layouts of {model}", list(LAYOUTS), share=3) for model in models}
    return [(model, name) for model in models for name in layouts[model]]


def why_not(model: str, layout: Layout) -> str:
    """Why a model can't be built in a layout; empty where it can."""
    if model == "GPT-OSS" and layout.expert_tensor > 1:
        return "Megatron-Core refuses experts with biases under expert tensor parallelism"
    return NOT_IN_BRIDGE.get(model, "")


@pytest.mark.parametrize(("model", "name"), drawn())
def test_every_element_comes_back(
    model: str, name: str, saved: Callable[[str], Saved], bridge_ranks: RankPool, tmp_path: Path
) -> None:
    first, layout = saved(model), of(LAYOUTS[name], model)
    if reason := why_not(model, layout):
        pytest.skip(reason)
    ranks = bridge_ranks.run(
        imported.load_and_compare,
        str(first.source),
        str(first.checkpoint),
        layout,
        again=str(tmp_path / "again"),
        # Where tensor parallelism cuts a parameter that is not its module's "weight" (A_log, a softmax offset), or a
        # convolution, Bridge 0.6.2 gathers it once more than Megatron-FSDP's export needs.
        export=layout.tensor == 1 and layout.strategy != "no_shard",
        ranks=layout.ranks,
    )
    for found in ranks:
        assert found.compared == found.tensors
        assert not found.held & found.same_before, "the load had nothing to do"
        assert found.different == []
        assert found.different_state == []
        assert found.different_compute_weights == []
        if found.exported is not None:
            assert [name for name, same in found.exported.items() if not same] == []
            assert found.exported
    assert set.union(*(found.held for found in ranks)) == set.union(*(found.tensors for found in ranks))
    assert oracle.on_disk(tmp_path / "again") == first.tensors

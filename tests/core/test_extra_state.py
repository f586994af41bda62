# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 state of real Transformer Engine modules: through JSON into fresh ones, which its own functions then accept.

No FP8 kernel runs here: the state is made by Transformer Engine's own functions, then filled with random numbers.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.errors import LayoutError
from mbridge_fsdp_ckpt.format.values import decode, encode
from mbridge_fsdp_ckpt.live.fp8 import state as extra_state
from testing.models import initialise
from testing.modules import is_installed
from testing.ranks import RankPool
from tests.extra_state import restore

pytestmark = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")

HISTORY, HIDDEN = 16, 32
EXPERTS = "module.decoder.layers.0.mlp.experts.linear_fc1"
PLAIN: dict[str, Any] = {"init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": False}
LIBRARY = ("Linear", "LayerNormLinear", "LayerNormMLP", "DotProductAttention")
MEGATRON = ("TEColumnParallelLinear", "TEDotProductAttention")


def config(**settings: Any) -> Any:
    """A transformer's configuration, FP8 with delayed scaling unless told otherwise."""
    from megatron.core.transformer import TransformerConfig

    settings = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": HISTORY, **settings}
    settings |= {"bf16": True, "params_dtype": torch.bfloat16, "gradient_accumulation_fusion": False}
    return TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, **settings)


def build(kind: str, **settings: Any) -> Any:
    """A module as a model has it before its first forward pass."""
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    if kind == "DotProductAttention":
        return te.DotProductAttention(2, HIDDEN // 2)
    if kind in LIBRARY:
        return getattr(te, kind)(HIDDEN, HIDDEN, params_dtype=torch.bfloat16)
    if kind == "TEDotProductAttention":
        return TEDotProductAttention(config(**settings), 1, AttnMaskType.causal, "self")
    return TEColumnParallelLinear(
        HIDDEN, HIDDEN, config=config(**settings), gather_output=False, is_expert=False, **PLAIN
    )


def build_experts(count: int, expert_ranks: int) -> Any:
    """Grouped experts of one of several expert-parallel ranks."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    settings = config(num_moe_experts=count * expert_ranks, expert_model_parallel_size=expert_ranks)
    return TEColumnParallelGroupedLinear(count, HIDDEN, HIDDEN, config=settings, is_expert=True, **PLAIN)


def start(module: Any, **recipe: Any) -> Any:
    """What the first forward pass in an FP8 region does before it computes."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe

    gemms = {"LayerNormMLP": 2, "DotProductAttention": 3, "TEDotProductAttention": 3}
    delayed = get_fp8_recipe(config(**recipe))
    with torch.no_grad(), te.autocast(enabled=True, recipe=delayed):
        module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", gemms.get(type(module).__name__, 1)))
    return module


def tensors(module: Any) -> list[torch.Tensor]:
    states = [module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]]
    return [tensor for state in states for tensor in (state.scale, state.amax_history)]


def fill(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(module):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return module


def numbered(first: int) -> Callable[[str], str]:
    def on_disk(name: str) -> str:
        prefix, weight, number = name.rpartition(".weight")
        return f"{prefix}{weight}{int(number) + first}" if number.isdigit() else name

    return on_disk


def through_json(states: Any) -> Any:
    return decode(json.loads(json.dumps(encode(states))))


def own_state(module: Any) -> dict[str, Any]:
    return dict(pickle.loads(module.get_extra_state().numpy().tobytes()))


def same(one: Any, other: Any) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors(one), tensors(other), strict=True))


def round_trip(kind: str) -> None:
    initialise(1)
    assert extra_state.collect([("x", build(kind))]) == {}
    saved = fill(start(build(kind)), seed=1)
    states = through_json(extra_state.collect([("x", saved)]))
    for fresh in (build(kind), start(build(kind)), fill(start(build(kind)), seed=2)):
        restore([("x", fresh)], states)
        same(fresh, saved)
        expected, found = own_state(saved), own_state(fresh)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found if name.startswith(("scale", "amax")))
        assert plain(vars(found["recipe"])) == plain(vars(expected["recipe"]))
        assert plain(found["extra_fp8_variables"]) == plain(expected["extra_fp8_variables"])
        survives_first_forward(fresh, saved)


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what the first forward pass makes anew: attention's list of recipes, a recipe's text."""
    return {name: value for name, value in fields.items() if name not in ("local_recipes", "_cached_repr")}


def survives_first_forward(fresh: Any, saved: Any) -> None:
    """The module's own preparation keeps the tensors, and its quantizers look at them."""
    before = [tensor.data_ptr() for tensor in tensors(fresh)]
    start(fresh)
    assert [tensor.data_ptr() for tensor in tensors(fresh)] == before
    same(fresh, saved)
    for way in ("scaling_fwd", "scaling_bwd"):
        state, quantizers = fresh.fp8_meta[way], fresh.quantizers[way]
        assert len(quantizers) == len(state.scale)
        for number, quantizer in enumerate(quantizers):
            assert quantizer.scale.data_ptr() == state.scale[number].data_ptr()
            assert quantizer.amax.data_ptr() == state.amax_history[0][number].data_ptr()


@pytest.mark.parametrize("kind", LIBRARY + MEGATRON)
def test_state_returns_and_lives_on(kind: str, megatron_ranks: RankPool) -> None:
    megatron_ranks.run(round_trip, kind, ranks=1)


def experts_move(saved_ranks: int, loaded_ranks: int) -> None:
    initialise(1)
    count = 8
    states: dict[str, Any] = {}
    columns: list[list[torch.Tensor]] = []
    for rank in range(saved_ranks):
        local = count // saved_ranks
        module = fill(start(build_experts(local, saved_ranks)), seed=rank)
        states |= through_json(extra_state.collect([(EXPERTS, module)], numbered(local * rank)))
        columns += [used_by(module, gemm) for gemm in range(local)]
    assert sorted(states) == [f"{EXPERTS}._extra_state{expert}" for expert in range(count)]
    for rank in range(loaded_ranks):
        local = count // loaded_ranks
        fresh = build_experts(local, loaded_ranks)
        restore([(EXPERTS, fresh)], states, numbered(local * rank))
        start(fresh)
        for gemm in range(local):
            pairs = zip(used_by(fresh, gemm), columns[local * rank + gemm], strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def used_by(module: Any, gemm: int) -> list[torch.Tensor]:
    """What the quantizers of one expert look at, found the way `GroupedLinear` finds them."""
    found = []
    for way, kinds in (("fwd", ("input", "weight", "output")), ("bwd", ("grad_output", "grad_input"))):
        stride = module._num_fp8_tensors_per_gemm[way]
        for kind in kinds:
            column = module._offsets[kind] + gemm * stride
            quantizer = module.quantizers[f"scaling_{way}"][column]
            found += [quantizer.scale.clone(), quantizer.amax.clone()]
            found.append(module.fp8_meta[f"scaling_{way}"].amax_history[:, column].clone())
    return found


@pytest.mark.parametrize(("saved_ranks", "loaded_ranks"), [(1, 1), (2, 4), (4, 2), (1, 8)])
def test_experts_keep_their_state_on_other_ranks(saved_ranks: int, loaded_ranks: int, megatron_ranks: RankPool) -> None:
    megatron_ranks.run(experts_move, saved_ranks, loaded_ranks, ranks=1)


def weights_in_fp8() -> None:
    """Such modules have state from the start, and their weights' quantizers see what is restored."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe

    initialise(1)
    saved = fill(start(build("Linear")), seed=1)
    states = extra_state.collect([("x", saved)])
    with te.quantized_model_init(enabled=True, recipe=get_fp8_recipe(config())):
        fresh = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="meta")
    weight = fresh.quantizers["scaling_fwd"][1]
    restore([("x", fresh)], states)
    same(fresh, saved)
    assert fresh.quantizers["scaling_fwd"][1] is weight
    assert torch.equal(weight.scale, saved.fp8_meta["scaling_fwd"].scale[1])
    assert torch.equal(weight.amax, saved.fp8_meta["scaling_fwd"].amax_history[0, 1:2])
    assert list(extra_state.collect([("x", fresh)])) == list(states)


def test_modules_with_fp8_weights(megatron_ranks: RankPool) -> None:
    megatron_ranks.run(weights_in_fp8, ranks=1)


def meets_other_models() -> list[str]:
    initialise(1)
    kind, log = "TEColumnParallelLinear", logging.getLogger("mbridge_fsdp_ckpt.live.fp8.state")
    heard: list[str] = []
    log.addFilter(lambda record: not heard.append(record.getMessage()))  # type: ignore[func-returns-value]
    states = extra_state.collect([("x", fill(start(build(kind)), seed=1))])
    for settings in ({"fp8": None}, {"fp8_recipe": "tensorwise"}, {"fp8": "e4m3"}):
        module = build(kind, **settings)
        restore([("x", module)], states)
        assert module.get_extra_state().numel() == 0
    restore([("x", build(kind))], {})
    stateless = start(build(kind), fp8_recipe="tensorwise")
    assert extra_state.collect([("x", stateless)]) == {}
    log.filters.clear()
    return heard


def test_models_that_scale_otherwise_start_as_they_would(megatron_ranks: RankPool) -> None:
    texts = megatron_ranks.run(meets_other_models, ranks=1)[0]
    assert ["ignored" in text for text in texts].count(True) == 3
    assert ["start fresh" in text for text in texts].count(True) == 2


def other_lengths() -> None:
    """As Transformer Engine does it: the first forward pass cuts or pads what was saved."""
    initialise(1)
    for length in (HISTORY // 2, HISTORY * 2):
        saved = fill(start(build("Linear")), seed=1)
        states = extra_state.collect([("x", saved)])
        fresh, ran = build("Linear"), start(build("Linear"), fp8_amax_history_len=length)
        for module in (fresh, ran):
            restore([("x", module)], states)
            start(module, fp8_amax_history_len=length)
            common = min(length, HISTORY)
            for way in ("scaling_fwd", "scaling_bwd"):
                assert torch.equal(module.fp8_meta[way].scale, saved.fp8_meta[way].scale)
                history = module.fp8_meta[way].amax_history
                assert len(history) == length
                assert torch.equal(history[:common], saved.fp8_meta[way].amax_history[:common])
                assert not history[common:].any()


def test_a_history_of_another_length(megatron_ranks: RankPool) -> None:
    megatron_ranks.run(other_lengths, ranks=1)


def wrong_recipes() -> None:
    initialise(1)
    states = extra_state.collect([("x", fill(start(build("Linear")), seed=1))])
    typed = states["x._extra_state"]
    wrong = ({"fp8_format": "E9"}, {"fp8_format": "E5M2"}, {"fp8_format": 3}, {"more": 1}, {"margin": "many"})
    for change in (*wrong, {"amax_compute_algo": "os.system"}, {"scaling_factor_compute_algo": "eval"}):
        fresh = build("Linear")
        before = dict(fresh.fp8_meta)
        recipe = {**typed["recipe"], **change}
        with pytest.raises(LayoutError, match="recipe"):
            restore([("x", fresh)], {"x._extra_state": {**typed, "recipe": recipe}})
        assert fresh.fp8_meta == before


def test_recipes_that_are_none_are_refused(megatron_ranks: RankPool) -> None:
    megatron_ranks.run(wrong_recipes, ranks=1)


def reduction_groups() -> list[bool]:
    from megatron.core import parallel_state

    initialise(1, expert_model_parallel_size=1)
    module = start(build("Linear"))
    found = []
    for tensor_only in (False, True):
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=tensor_only)
        module.fp8_meta["fp8_group"] = group
        found.append(extra_state.replicas_agree(module, 2))
    return found


def test_replicas_agree_where_amaxes_are_reduced_over_them(megatron_ranks: RankPool) -> None:
    assert megatron_ranks.run(reduction_groups, ranks=2) == [[True, False]] * 2

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the built-in families claim, with plain objects in the place of modules."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import FamilyError
from mbridge_fsdp_ckpt.families import FamilyRegistry, ParameterContext
from mbridge_fsdp_ckpt.families.built_in import FAMILIES
from mbridge_fsdp_ckpt.families.gated_delta_net import GatedDeltaNetFamily
from mbridge_fsdp_ckpt.families.gated_linear_unit import GatedLinearUnitFamily
from mbridge_fsdp_ckpt.families.hidden import refuse_hidden
from mbridge_fsdp_ckpt.families.latent_attention import LatentAttentionFamily
from mbridge_fsdp_ckpt.families.mamba import MambaFamily

LAYER = "decoder.layers.0"


def context(name: str, shape: tuple[int, ...], modules: dict[str, Any]) -> ParameterContext:
    """A parameter whose ancestors are empty objects but for the given ones."""
    ancestors, path = [], name
    while path:
        path = path.rpartition(".")[0]
        ancestors.append((path, modules.get(path, SimpleNamespace())))
    return ParameterContext(name, tuple(ancestors), shape)


def gated(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(gated_linear_unit=True, **settings))


def gated_segments(name: str, shape: tuple[int, ...], modules: dict[str, Any]) -> list[tuple[str, int]] | None:
    segments = GatedLinearUnitFamily().segments(context(name, shape, modules))
    return segments if segments is None else [(s.suffix, s.rows) for s in segments]


def test_a_context_names_its_leaf_and_its_ancestors() -> None:
    owner = SimpleNamespace()
    parameter = context("decoder.mlp.linear_fc1.weight3", (2,), {"decoder.mlp": owner})
    assert parameter.leaf == "weight3"
    assert parameter.ancestor(1) is owner
    assert [parameter.child_name(level) for level in range(5)] == ["linear_fc1", "mlp", "decoder", "", ""]
    assert parameter.ancestor(3) is not None
    assert parameter.ancestor(4) is None


@pytest.mark.parametrize(
    ("mlp", "leaf", "shape"),
    [
        (f"{LAYER}.mlp", "weight", (8, 3)),
        (f"{LAYER}.mlp", "bias", (8,)),
        (f"{LAYER}.mlp.experts", "weight3", (8, 3)),
        (f"{LAYER}.mlp.experts", "bias12", (8,)),
        (f"{LAYER}.mlp.experts.local_experts.2", "weight", (8, 3)),
        (f"{LAYER}.mlp.shared_experts", "weight", (8, 3)),
        ("vision_model.layers.0.mlp", "weight", (8, 3)),
    ],
)
def test_the_first_layer_of_a_gated_mlp_is_gate_and_up(mlp: str, leaf: str, shape: tuple[int, ...]) -> None:
    assert gated_segments(f"{mlp}.linear_fc1.{leaf}", shape, {mlp: gated()}) == [("_w", 4), ("_v", 4)]


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.mlp.linear_fc2.weight",
        f"{LAYER}.mlp.linear_fc1.layer_norm_weight",
        f"{LAYER}.mlp.linear_fc1.weight_scale",
        f"{LAYER}.mlp.linear_fc1.lora.weight",
        f"{LAYER}.mlp.gate.weight",
    ],
)
def test_other_parameters_of_a_gated_mlp_are_not_claimed(name: str) -> None:
    assert gated_segments(name, (8, 3), {f"{LAYER}.mlp": gated()}) is None


@pytest.mark.parametrize(
    "owner",
    [SimpleNamespace(config=SimpleNamespace(gated_linear_unit=False)), SimpleNamespace(config=None), SimpleNamespace()],
)
def test_the_config_of_the_owner_decides_not_the_model(owner: SimpleNamespace) -> None:
    modules = {"": gated(), LAYER: gated(), f"{LAYER}.mlp": owner}
    assert gated_segments(f"{LAYER}.mlp.linear_fc1.weight", (8, 3), modules) is None


def test_a_first_layer_without_an_owner_is_not_claimed() -> None:
    family = GatedLinearUnitFamily()
    assert family.segments(ParameterContext("linear_fc1.weight", (("linear_fc1", gated()),), (8, 3))) is None


def test_an_odd_number_of_rows_names_the_parameter() -> None:
    with pytest.raises(FamilyError, match="even number of rows") as caught:
        gated_segments(f"{LAYER}.mlp.linear_fc1.weight", (7, 3), {f"{LAYER}.mlp": gated()})
    assert caught.value.key == f"{LAYER}.mlp.linear_fc1.weight"


GROUPED, SEQUENTIAL = f"{LAYER}.mlp.experts", f"{LAYER}.mlp.experts.local_experts.0"
SHARED, DENSE = f"{LAYER}.mlp.shared_experts", f"{LAYER}.mlp"
HALVES, WOVEN = [("_w", 4), ("_v", 4)], [("_w", 2), ("_v", 2), ("_w", 2), ("_v", 2)]


@pytest.mark.parametrize(
    ("mlp", "leaf", "settings", "expected"),
    [
        (GROUPED, "weight0", {"moe_mlp_glu_interleave_size": 2}, WOVEN),
        (GROUPED, "weight0", {"moe_mlp_glu_interleave_size": 4}, HALVES),
        (GROUPED, "weight0", {"moe_mlp_glu_interleave_size": None}, HALVES),
        (GROUPED, "weight0", {"moe_shared_expert_glu_interleave_size": 2}, HALVES),
        (SHARED, "weight", {"moe_mlp_glu_interleave_size": 2}, HALVES),
        (
            SHARED,
            "weight",
            {"moe_shared_expert_glu_interleave_size": 2, "use_grouped_gemm_for_shared_expert": True},
            WOVEN,
        ),
        # Megatron-Core documents each setting for one kind of layer alone; the others read halves.
        (SHARED, "weight", {"moe_shared_expert_glu_interleave_size": 2}, HALVES),
        (SEQUENTIAL, "weight", {"moe_mlp_glu_interleave_size": 2}, HALVES),
        (DENSE, "weight", {"moe_mlp_glu_interleave_size": 2}, HALVES),
    ],
)
def test_interleaving_follows_the_setting_of_the_layer_it_is_for(
    mlp: str, leaf: str, settings: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    defaults = {"use_grouped_gemm_for_shared_expert": False}
    assert gated_segments(f"{mlp}.linear_fc1.{leaf}", (8, 3), {mlp: gated(**defaults | settings)}) == expected


def test_an_interleave_size_that_does_not_divide_names_the_parameter() -> None:
    with pytest.raises(FamilyError, match="interleave size 3") as caught:
        gated_segments(f"{GROUPED}.linear_fc1.weight0", (8, 3), {GROUPED: gated(moe_mlp_glu_interleave_size=3)})
    assert caught.value.key == f"{GROUPED}.linear_fc1.weight0"


OLDER_MIXER = SimpleNamespace(qk_dim_local_tp=2, v_dim_local_tp=3, num_v_heads_local_tp=1)  # Megatron-Core 0.18's
MIXER = SimpleNamespace(
    in_proj_split_names=["query", "key", "value", "z", "beta", "alpha"],
    in_proj_split_sections=[2, 2, 3, 3, 1, 1],
    **vars(OLDER_MIXER),
)
IN_PROJ = [(".query", 2), (".key", 2), (".value", 3), (".z", 3), (".beta", 1), (".alpha", 1)]
CONV = [(".query", 2), (".key", 2), (".value", 3)]


@pytest.mark.parametrize("mixer", [MIXER, OLDER_MIXER], ids=["0.19", "0.18"])
@pytest.mark.parametrize(
    ("child", "shape", "expected"),
    [
        ("in_proj.weight", (12, 4), IN_PROJ),
        ("in_proj.bias", (12,), IN_PROJ),
        ("conv1d.weight", (7, 1, 4), CONV),
        ("conv1d.bias", (7,), CONV),
        ("in_proj.layer_norm_weight", (4,), None),
        ("out_proj.weight", (4, 3), None),
        ("A_log", (1,), None),
    ],
)
def test_gated_delta_net_splits_its_projections(
    child: str, shape: tuple[int, ...], expected: list[tuple[str, int]] | None, mixer: SimpleNamespace
) -> None:
    name = f"{LAYER}.self_attention.{child}"
    claim = FamilyRegistry([GatedDeltaNetFamily()]).claim(context(name, shape, {f"{LAYER}.self_attention": mixer}))
    assert (claim and [(s.suffix, s.rows) for s in claim.segments]) == expected


def test_in_proj_of_another_module_is_not_gated_delta_net() -> None:
    assert GatedDeltaNetFamily().segments(context(f"{LAYER}.mixer.in_proj.weight", (12, 4), {})) is None


def test_a_gated_delta_net_with_fewer_names_than_sections_is_an_error() -> None:
    mixer = SimpleNamespace(in_proj_split_names=["query"], in_proj_split_sections=[2, 2], qk_dim_local_tp=2)
    parameter = context(f"{LAYER}.self_attention.in_proj.weight", (4, 4), {f"{LAYER}.self_attention": mixer})
    with pytest.raises(FamilyError, match="gated_delta_net"):
        FamilyRegistry([GatedDeltaNetFamily()]).claim(parameter)


MAMBA = SimpleNamespace(d_inner_local_tp=6, ngroups_local_tp=2, d_state=4, nheads_local_tp=3)


@pytest.mark.parametrize(
    ("child", "shape", "expected"),
    [
        ("in_proj.weight", (31, 4), [(".z", 6), (".x", 6), (".B", 8), (".C", 8), (".dt", 3)]),
        ("conv1d_weight", (22, 1, 4), [(".x", 6), (".B", 8), (".C", 8)]),
        ("conv1d_bias", (22,), [(".x", 6), (".B", 8), (".C", 8)]),
        ("in_proj.layer_norm_weight", (4,), None),
        ("norm.weight", (6,), None),
        ("A_log", (3,), None),
    ],
)
def test_mamba_splits_its_projection_and_convolution(
    child: str, shape: tuple[int, ...], expected: list[tuple[str, int]] | None
) -> None:
    claim = FamilyRegistry([MambaFamily()]).claim(context(f"{LAYER}.mixer.{child}", shape, {f"{LAYER}.mixer": MAMBA}))
    assert (claim and [(s.suffix, s.rows) for s in claim.segments]) == expected


LATENT = SimpleNamespace(config=SimpleNamespace(q_lora_rank=8, kv_lora_rank=12, qk_pos_emb_head_dim=4))


@pytest.mark.parametrize(("rows", "expected"), [(24, (8, 16)), (12, (4, 8)), (6, (2, 4))])
def test_a_fused_down_projection_is_two_modules_on_disk(rows: int, expected: tuple[int, int]) -> None:
    attention = f"{LAYER}.self_attention"
    parameter = context(f"{attention}.linear_qkv_down_proj.weight", (rows, 4), {attention: LATENT})
    claim = FamilyRegistry([LatentAttentionFamily()]).claim(parameter)
    assert claim is not None
    assert [(s.module, s.rows) for s in claim.segments] == [
        ("linear_q_down_proj", expected[0]),
        ("linear_kv_down_proj", expected[1]),
    ]


def test_a_fused_down_projection_that_tensor_parallelism_cannot_cut_is_named() -> None:
    attention = f"{LAYER}.self_attention"
    parameter = context(f"{attention}.linear_qkv_down_proj.weight", (5, 4), {attention: LATENT})
    with pytest.raises(FamilyError, match="5 rows on one TP rank") as caught:
        LatentAttentionFamily().segments(parameter)
    assert caught.value.key == parameter.name


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("adapter.linear_out.weight", HALVES),
        ("adapter.weight_magnitude", HALVES),
        ("adapter.linear_in.weight", None),
        ("adapter.adapter_gate.linear_out.weight", None),
        ("weight", HALVES),
    ],
)
def test_an_adapters_output_is_fused_as_the_layer_it_adapts(child: str, expected: list[tuple[str, int]] | None) -> None:
    wrapper = SimpleNamespace(to_wrap=SimpleNamespace())
    modules = {f"{LAYER}.mlp": gated(), f"{LAYER}.mlp.linear_fc1": wrapper}
    claim = FamilyRegistry([GatedLinearUnitFamily()]).claim(context(f"{LAYER}.mlp.linear_fc1.{child}", (8, 2), modules))
    assert (claim and [(s.suffix, s.rows) for s in claim.segments]) == expected


def test_a_parameter_marked_as_fused_that_nobody_claims_is_named_with_its_sizes() -> None:
    parameter = replace(context("decoder.strange.weight", (12, 4), {}), fused="partition_sizes [4, 8]")
    with pytest.raises(FamilyError, match=r"partition_sizes \[4, 8\], shape \(12, 4\)") as caught:
        FamilyRegistry([GatedLinearUnitFamily()]).claim(parameter)
    assert caught.value.key == "decoder.strange.weight"


HIDDEN = "layers.0.self_attention.in_proj.inner.weight"
DELTA_NET = SimpleNamespace(qk_dim_local_tp=2, in_proj_split_names=("query", "key"), in_proj_split_sections=(2, 2))


@pytest.mark.parametrize(
    ("name", "shape", "refused"),
    [
        (HIDDEN, (4, 3), True),
        (HIDDEN.replace("inner", "more.inner"), (4, 3), True),
        (HIDDEN, (5, 3), False),  # something else: the family's rows are not its
        (HIDDEN.replace("inner", "adapter.linear_in"), (4, 3), False),
        (HIDDEN.replace("in_proj.inner", "out_proj"), (4, 3), False),
        (HIDDEN.replace("weight", "layer_norm_weight"), (4, 3), False),
    ],
)
def test_a_fused_parameter_that_a_module_hides_is_refused(name: str, shape: tuple[int, ...], refused: bool) -> None:
    registry = FamilyRegistry(FAMILIES)
    parameter = context(name, shape, {"layers.0.self_attention": DELTA_NET})
    assert registry.claim(parameter) is None
    if not refused:
        refuse_hidden(parameter, registry)
        return
    with pytest.raises(FamilyError, match=rf"\[{name}\] expected {HIDDEN.replace('.inner', '')}, .* 'gated_delta_net'"):
        refuse_hidden(parameter, registry)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Names on disk: literal tables, with plain objects in the place of modules."""

from types import SimpleNamespace
from typing import Any

import pytest

from mbridge_fsdp_ckpt.families.naming import Naming, is_expert_name
from mbridge_fsdp_ckpt.families.wrapping import unwrapped_modules

EXPERTS = {f"layers.3.mlp.{name}": SimpleNamespace(num_local_experts=2) for name in ("experts", "shared_experts")}


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("layers.3.mlp.experts.local_experts.0.linear_fc1.weight", 1, "local_experts.2.linear_fc1.weight"),
        ("layers.3.mlp.experts.local_experts.1.linear_fc2.bias", 4, "local_experts.9.linear_fc2.bias"),
        ("layers.3.mlp.experts.linear_fc1.weight1", 1, "experts.linear_fc1.weight3"),
        ("layers.3.mlp.experts.linear_fc2.bias0", 64, "experts.linear_fc2.bias128"),
        ("layers.3.mlp.experts.linear_fc1.weight1", 0, "experts.linear_fc1.weight1"),
        ("layers.3.mlp.shared_experts.linear_fc1.weight", 2, "shared_experts.linear_fc1.weight"),
        ("layers.3.mlp.experts.linear_fc1.weight", 2, "experts.linear_fc1.weight"),
        ("layers.3.mlp.router.weight", 2, "router.weight"),
        ("layers.3.mlp.linear_fc1.weight1", 2, "linear_fc1.weight1"),
    ],
)
def test_experts_are_numbered_over_all_expert_parallel_ranks(name: str, rank: int, expected: str) -> None:
    found = Naming(EXPERTS, expert_rank=rank).on_disk(name)
    assert found.startswith("layers.3.mlp.")
    assert found.endswith(f".{expected}")


def test_each_layer_counts_its_own_experts() -> None:
    modules = {f"layers.{n}.mlp.experts": SimpleNamespace(num_local_experts=n) for n in (2, 8)}
    naming = Naming({f"module.{name}": module for name, module in modules.items()}, expert_rank=1)
    assert (
        naming.on_disk("layers.2.mlp.experts.linear_fc1.weight0", "module") == "layers.2.mlp.experts.linear_fc1.weight2"
    )
    assert (
        naming.on_disk("layers.8.mlp.experts.linear_fc1.weight0", "module") == "layers.8.mlp.experts.linear_fc1.weight8"
    )


def stage(first_layer: int, **model: Any) -> dict[str, Any]:
    """Modules of a pipeline stage of two layers."""
    return {
        "module": SimpleNamespace(**model),
        "module.decoder.layers.0": SimpleNamespace(layer_number=first_layer),
        "module.decoder.layers.1": SimpleNamespace(layer_number=first_layer + 1),
        "module.vision.blocks.0": SimpleNamespace(),
    }


@pytest.mark.parametrize(
    ("stages", "name", "expected"),
    [
        (2, "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.8.mlp.linear_fc2.weight"),
        (2, "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.9.mlp.linear_fc2.weight"),
        (1, "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"),
        (2, "vision.blocks.0.weight", "vision.blocks.0.weight"),
        (2, "decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ],
)
def test_layers_are_numbered_over_all_stages(stages: int, name: str, expected: str) -> None:
    assert Naming(stage(9), stages=stages).on_disk(name, "module") == expected


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.mark.parametrize(
    ("name", "is_first", "is_tied", "stages", "on_disk", "is_copy"),
    [
        (EMBEDDING, True, True, 2, EMBEDDING, False),
        (OUTPUT, False, True, 2, EMBEDDING, True),
        (OUTPUT, False, False, 2, OUTPUT, False),
        (EMBEDDING, False, False, 2, EMBEDDING, True),  # of multi-token prediction, tied or not
        (OUTPUT, True, False, 1, OUTPUT, False),
    ],
)
def test_a_later_stage_names_its_copy_of_tied_embeddings_as_the_first_does(
    name: str, is_first: bool, is_tied: bool, stages: int, on_disk: str, is_copy: bool
) -> None:
    modules = stage(1, pre_process=is_first, share_embeddings_and_output_weights=is_tied)
    naming = Naming(modules, stages=stages)
    owner, _, leaf = name.rpartition(".")
    for seen in (name, f"_orig_mod.{owner}._checkpoint_wrapped_module.{leaf}"):
        assert naming.on_disk(seen, "module") == on_disk
        assert naming.is_copy(seen, "module") is is_copy


@pytest.mark.parametrize(("pattern", "expected"), [(None, "transformer_layer"), ("M*", "mtp_model_layer")])
def test_the_layer_inside_multi_token_prediction_keeps_its_old_name(pattern: str | None, expected: str) -> None:
    modules = {"mtp.layers.0": SimpleNamespace(mtp_layer_pattern=pattern)}
    name = "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight"
    assert Naming(modules).on_disk(name) == f"mtp.layers.0.{expected}.mlp.linear_fc2.weight"


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_the_norm_that_a_fused_down_projection_absorbed_keeps_its_name(leaf: str) -> None:
    layer = "decoder.layers.0"
    name = f"{layer}.self_attention.linear_qkv_down_proj.layer_norm_{leaf}"
    assert Naming({}).on_disk(name) == f"{layer}.input_layernorm.{leaf}"


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        ({"d_inner_local_tp": 8}, "mixer.conv1d.weight", "mixer.conv1d_weight"),
        ({"d_inner_local_tp": 8}, "mixer.conv1d.bias", "mixer.conv1d_bias"),
        ({"d_inner_local_tp": 8}, "mixer.conv1d_weight", "mixer.conv1d_weight"),
        ({}, "mixer.conv1d.weight", "mixer.conv1d.weight"),  # of Gated DeltaNet
    ],
)
def test_the_convolution_of_mamba_has_one_name(owner: dict[str, int], name: str, expected: str) -> None:
    modules = {"module.layers.0.mixer": SimpleNamespace(**owner)}
    assert Naming(modules).on_disk(f"layers.0.{name}", "module") == f"layers.0.{expected}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.mlp.experts.linear_fc1.weight0", True),
        ("layers.0.mlp.experts.local_experts.0.linear_fc1.weight", True),
        ("experts.linear_fc1.weight0", True),
        ("layers.0.mlp.shared_experts.linear_fc1.weight", False),
        ("layers.0.mlp.experts", False),
        ("layers.0.mlp.router.expert_bias", False),
    ],
)
def test_expert_names(name: str, expected: bool) -> None:
    assert is_expert_name(name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0._orig_mod.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc1.weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.weight", "layers.0.weight"),
        ("layers.0.my_orig_mod.weight", "layers.0.my_orig_mod.weight"),
        ("layers.0._orig_mod2.weight", "layers.0._orig_mod2.weight"),
        ("layers.0._orig_mod._extra_state", "layers.0._extra_state"),
    ],
)
def test_wrappers_of_torch_do_not_count_in_names(name: str, expected: str) -> None:
    assert Naming({}).on_disk(name) == expected


def test_experts_and_layers_are_numbered_whatever_is_wrapped() -> None:
    layer, experts = SimpleNamespace(layer_number=9), SimpleNamespace(num_local_experts=2)
    wrapper = SimpleNamespace()
    modules = unwrapped_modules(
        [
            ("module.layers.0", wrapper),
            ("module.layers.0._checkpoint_wrapped_module", wrapper),
            ("module.layers.0._checkpoint_wrapped_module._orig_mod", layer),
            ("module.layers.0._checkpoint_wrapped_module._orig_mod.experts", wrapper),
            ("module.layers.0._checkpoint_wrapped_module._orig_mod.experts._orig_mod", experts),
        ]
    )
    naming = Naming(modules, expert_rank=1, stages=2)
    seen = (
        "layers.0._orig_mod.experts._orig_mod.local_experts._orig_mod.1._orig_mod.linear_fc1.weight"  # of a state dict
    )
    assert naming.on_disk(seen, "module") == "layers.8.experts.local_experts.3.linear_fc1.weight"

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The models of the recipes, as their publishers describe them on Hugging Face.

Nothing is read from the network: a configuration is the class that transformers has for the model, whose defaults are
often the published values, and here what differs from those.  Megatron-Bridge converts it as it would the downloaded
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """A text model.

    Args:
        architecture: Class of the model in transformers, by which Bridge chooses the conversion.
        config: Class of its configuration.
        settings: What the published configuration has otherwise than the class's defaults.
    """

    architecture: str
    config: str
    settings: Mapping[str, Any]

    def hugging_face(self) -> Any:
        """The configuration in transformers."""
        import transformers

        return getattr(transformers, self.config)(architectures=[self.architecture], **self.settings)

    def provider(self) -> Any:
        """Bridge's description of the model, to be changed by the recipe; its weights would be random."""
        import torch
        from megatron.bridge import AutoBridge

        provider = AutoBridge.from_hf_config(self.hugging_face()).to_megatron_provider(load_weights=False)
        provider.pipeline_dtype = torch.bfloat16
        return provider


def _rope(base: int, **more: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


_QWEN35: dict[str, Any] = {
    "max_position_embeddings": 262_144,
    "rope_parameters": _rope(10_000_000, partial_rotary_factor=0.25),
}

QWEN35_35B_A3B = Published("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _QWEN35)

QWEN35_397B_A17B = Published(
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeTextConfig",
    {
        **_QWEN35,
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
)

QWEN3_30B_A3B = Published(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    {
        "num_hidden_layers": 48,
        "head_dim": 128,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rope_parameters": _rope(1_000_000),
    },
)

QWEN3_NEXT_80B_A3B = Published(
    "Qwen3NextForCausalLM",
    "Qwen3NextConfig",
    {"max_position_embeddings": 262_144, "rope_parameters": _rope(10_000_000, partial_rotary_factor=0.25)},
)

QWEN3_8B = Published(
    "Qwen3ForCausalLM",
    "Qwen3Config",
    {
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
        "rope_parameters": _rope(1_000_000),
    },
)

NEMOTRON_3_NANO = Published(
    "NemotronHForCausalLM",
    "NemotronHConfig",
    {
        # M a Mamba layer, E experts, * attention
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "num_key_value_heads": 2,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 262_144,
    },
)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A tiny configuration of any architecture in `transformers`, by rule: what its class calls a size is made small.

The layers are as many as it takes until each kind of layer that the class's own default has is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, VOCABULARY, EXPERTS = 64, 128, 4

_SIZES: dict[str, Any] = {
    # every model
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "sliding_window": 16,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "dense_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "moe_layer_end_index": 1,
    # latent and sparse attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "global_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 8,
    # linear attention and state spaces
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    # embeddings of each layer
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    # multi-token prediction, which transformers knows no tensors of
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
    # images
    "depth": 2,
    "num_heads": 4,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "mm_tokens_per_image": 4,
    "projector_hidden_size": 48,
    # sound
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "output_dim": HIDDEN,
    "downsample_hidden_size": 16,
}
"""What a configuration may have, and what it then gets."""


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.0}  # the default by a name that Bridge's class knows
_OF_ARCHITECTURES: dict[str, dict[str, Any]] = {
    # published configurations have these; classes' defaults don't
    "DeepseekV4ForCausalLM": {"rope_parameters": _YARN},
    "FalconH1ForCausalLM": {"mamba_norm_before_gate": False, "mamba_n_groups": 2},  # tensor parallelism cuts groups
    "Gemma3ForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 16, "use_qk_norm": False}},
    "GlmMoeDsaForCausalLM": {"indexer_rope_interleave": True},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
    "KimiK2ForCausalLM": {"scoring_func": "sigmoid"},
    "Mistral3ForConditionalGeneration": {
        "text_config": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
    },
    "NemotronForCausalLM": {"num_key_value_heads": 4},
    "Qwen3ASRForConditionalGeneration": {
        "thinker_config": {"pad_token_id": 0, "text_config": {"pad_token_id": 0, "rope_scaling": _LINEAR}}
    },
    # sizes that hang together
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "Qwen3VLMoeForConditionalGeneration": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    # what the bridge is for
    "Exaone4ForCausalLM": {"tie_word_embeddings": True},  # no output layer
    "OlmoeForCausalLM": {"num_key_value_heads": 8},  # no groups of queries
    "Qwen2_5OmniForConditionalGeneration": {
        "enable_audio_output": False,
        "thinker_config": {"text_config": {"tie_word_embeddings": False}},
    },
    "Qwen3OmniMoeForConditionalGeneration": {"enable_audio_output": False},
}
"""What the rule does not find, by architecture."""

RENAMED = {"Qwen2AudioForConditionalGeneration": ("language_model.model.model.", "language_model.model.")}
"""What `transformers` writes under another name than the published checkpoints have, and that name."""

KIN = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM", "KimiK2ForCausalLM": "DeepseekV3ForCausalLM"}
"""Architectures whose code comes with the model, and those in `transformers` that have their very tensors."""


def settings(architecture: str) -> tuple[str, dict[str, Any]] | None:
    """The name of an architecture's configuration class, and what to set; None where the architecture is unknown."""
    known = class_named(KIN.get(architecture, architecture))
    if known is None:
        return None
    config = known.config_class
    return config.__name__, _merged(_small(config), _OF_ARCHITECTURES.get(architecture, {}))


def class_named(name: str) -> Any:
    """A class of transformers', or one that was registered with it, as Bridge does; None if there is none."""
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM

    registered = AutoModel._model_mapping._extra_content | AutoModelForCausalLM._model_mapping._extra_content
    kinds = [*registered, *registered.values()]
    return getattr(transformers, name, {kind.__name__: kind for kind in kinds}.get(name))


def _small(config: Any) -> dict[str, Any]:
    """What to set in a configuration class and, nested, in the classes of its parts."""
    default = config()
    aliases = getattr(config, "attribute_map", {})  # they would set another size
    sizes = {name: size for name, size in _SIZES.items() if name not in aliases}
    found = {name: size for name, size in sizes.items() if isinstance(getattr(default, name, None), int)}
    for name, part in getattr(config, "sub_configs", {}).items():
        named = type(getattr(default, name)) if part.__name__ == "AutoConfig" else part
        found[name] = _small(named) | ({"model_type": named.model_type} if named is not part else {})
    if isinstance(getattr(default, "num_hidden_layers", None), int):
        found["num_hidden_layers"] = _layers(config, found, default)
    return found


def _layers(config: Any, small: Mapping[str, Any], default: Any) -> int:
    """The smallest number of layers, two at least, that has each kind of the default's."""
    for count in range(2, default.num_hidden_layers):
        if _kinds(config(**small, num_hidden_layers=count)) == _kinds(default):
            return count
    return int(default.num_hidden_layers)


def _kinds(config: Any) -> dict[str, set[str]]:
    """By list with one entry a layer: which entries it has."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list)}
    return {name: set(map(str, value)) for name, value in lists.items() if len(value) == config.num_hidden_layers}


def _merged(ours: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, the others' first."""
    both = {name: _merged(ours[name], others[name]) for name in others if isinstance(ours.get(name), dict)}
    return ours | dict(others) | both

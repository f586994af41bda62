# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face checkpoints, written offline: a config object, every tensor random.

Every element of a checkpoint is drawn for itself, norms and biases too, so that a row in the wrong place shows.  Layers
for multi-token prediction, which `transformers` ignores, are added by hand, named as the published checkpoints name
them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.models import tiny
from tests.models.tiny import EXPERTS, HIDDEN, VOCABULARY

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_GATED_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint to write.

    Args:
        architecture: Class in `transformers`.
        config: Its config class, and what to set.
        add: Names and shapes of tensors that `transformers` does not know, from those it does.
        rename: What `transformers` names otherwise than the published checkpoints do.
        called: The architecture that config.json names, if it is not the class.
    """

    architecture: str
    config: tuple[str, dict[str, Any]]
    add: Callable[[Shapes], Shapes] = lambda shapes: {}
    rename: tuple[str, str] = ("", "")
    called: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether there are experts to distribute."""
        return _has_experts(self.config[1])


def _has_experts(settings: Mapping[str, Any]) -> bool:
    return any("experts" in name or (isinstance(part, dict) and _has_experts(part)) for name, part in settings.items())


def _deepseek_mtp(shapes: Shapes) -> Shapes:
    last = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
    layer = _renamed(shapes, f"model.layers.{last - 1}.", f"model.layers.{last}.")
    ends: Shapes = {"enorm.weight": (HIDDEN,), "hnorm.weight": (HIDDEN,), "shared_head.norm.weight": (HIDDEN,)}
    ends["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return layer | {f"model.layers.{last}.{name}": shape for name, shape in ends.items()}


def _qwen_mtp(shapes: Shapes) -> Shapes:
    attention = next(name for name in shapes if name.endswith("layers.1.self_attn.q_proj.weight"))
    layer = _renamed(shapes, attention.removesuffix("self_attn.q_proj.weight"), "mtp.layers.0.")
    norms = dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (HIDDEN,))
    return (
        layer | {f"mtp.{name}.weight": shape for name, shape in norms.items()} | {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    )


def _nemotron_mtp(shapes: Shapes) -> Shapes:
    first = _renamed(shapes, "backbone.layers.1.", "mtp.layers.0.")  # attention
    last = _renamed(shapes, "backbone.layers.3.", "mtp.layers.1.")  # experts
    norms = dict.fromkeys(("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"), (HIDDEN,))
    ends = {f"mtp.{name}.weight": shape for name, shape in norms.items()}
    return first | last | ends | {"mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}


def _renamed(shapes: Shapes, prefix: str, other: str) -> Shapes:
    return {other + name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


MODELS: dict[str, Model] = {
    "Qwen3.5-MoE": Model(
        "Qwen3_5MoeForCausalLM",
        ("Qwen3_5MoeTextConfig", _COMMON | _GATED_DELTA_NET | _EXPERTS | {"mtp_num_hidden_layers": 1}),
        _qwen_mtp,
    ),
    "Qwen3.5": Model(
        "Qwen3_5ForCausalLM",
        ("Qwen3_5TextConfig", _COMMON | _GATED_DELTA_NET | {"intermediate_size": 96, "mtp_num_hidden_layers": 1}),
        _qwen_mtp,
    ),
    "Qwen3-Next": Model(
        "Qwen3NextForCausalLM",
        ("Qwen3NextConfig", _COMMON | _GATED_DELTA_NET | _EXPERTS | {"mtp_num_hidden_layers": 1}),
        _qwen_mtp,
    ),
    "Qwen3-MoE": Model("Qwen3MoeForCausalLM", ("Qwen3MoeConfig", _COMMON | _EXPERTS | {"num_hidden_layers": 2})),
    "Qwen3": Model(
        "Qwen3ForCausalLM",
        ("Qwen3Config", _COMMON | {"num_hidden_layers": 2, "intermediate_size": 96, "tie_word_embeddings": True}),
    ),
    "DeepSeek-V3": Model(
        "DeepseekV3ForCausalLM",
        (
            "DeepseekV3Config",
            {
                "vocab_size": VOCABULARY,
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_hidden_layers": 2,
                "first_k_dense_replace": 1,
                "intermediate_size": 96,
                "moe_intermediate_size": 32,
                "n_routed_experts": EXPERTS,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "max_position_embeddings": 128,
                "num_nextn_predict_layers": 1,
            },
        ),
        _deepseek_mtp,
    ),
    "GPT-OSS": Model(
        "GptOssForCausalLM",
        (
            "GptOssConfig",
            _COMMON
            | {
                "num_hidden_layers": 2,
                "num_local_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "intermediate_size": 48,
                "sliding_window": 16,
            },
        ),
    ),
    "Mixtral": Model(
        "MixtralForCausalLM",
        (
            "MixtralConfig",
            _COMMON | {"num_hidden_layers": 2, "num_local_experts": EXPERTS, "intermediate_size": 96},
        ),
    ),
    "Nemotron-H": Model(
        "NemotronHForCausalLM",
        (
            "NemotronHConfig",
            _COMMON
            | {
                "layers_block_type": ["mamba", "attention", "mamba", "moe", "mlp"],
                "intermediate_size": 96,
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "ssm_state_size": 8,
                "n_groups": 4,
                "n_routed_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 40,
                "num_nextn_predict_layers": 1,
                "mtp_layers_block_type": ["attention", "moe"],
            },
        ),
        _nemotron_mtp,
        ("backbone.embedding.weight", "backbone.embeddings.weight"),
    ),
    "Qwen3-VL": Model(
        "Qwen3VLForConditionalGeneration",
        (
            "Qwen3VLConfig",
            {
                "text_config": _COMMON
                | {
                    "num_hidden_layers": 2,
                    "intermediate_size": 96,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
                },
                "vision_config": _VISION | {"deepstack_visual_indexes": [0, 1]},
                "tie_word_embeddings": False,
            },
        ),
    ),
    "Qwen3.5-VL-MoE": Model(
        "Qwen3_5MoeForConditionalGeneration",
        (
            "Qwen3_5MoeConfig",
            {
                "text_config": _COMMON | _GATED_DELTA_NET | _EXPERTS,
                "vision_config": _VISION,
                "tie_word_embeddings": False,
            },
        ),
    ),
}


ASKING_FOR_CUDA: dict[str, Model] = {
    "MiniMax-M2": Model(
        "MiniMaxM2ForCausalLM",
        ("MiniMaxM2Config", _COMMON | {"num_hidden_layers": 2, "num_local_experts": EXPERTS, "intermediate_size": 96}),
    ),
}
"""Models whose bridges name a CUDA device while they convert."""


def named(name: str) -> Model | None:
    """A model of these tables, by its name or architecture; any other architecture by rule, where it is known."""
    known = MODELS | ASKING_FOR_CUDA
    known |= {model.architecture: model for model in known.values()}
    if name in known:
        return known[name]
    config = tiny.settings(name)
    if config is None:
        return None
    return Model(tiny.KIN.get(name, name), config, rename=tiny.RENAMED.get(name, ("", "")), called=name)


def write(name: str, directory: str | Path) -> None:
    """Write the checkpoint: config.json and one file of bf16 tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = named(name)
    assert model is not None, f"transformers does not know {name}"
    config_class, settings = model.config
    whole = tiny.class_named(model.architecture)(tiny.class_named(config_class)(**settings)).to(torch.bfloat16)
    _save(whole, str(directory))
    if model.called:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [model.called]}))
    path = Path(directory) / "model.safetensors"
    with safe_open(str(path), "pt") as file:
        known = {key.replace(*model.rename): tuple(file.get_slice(key).get_shape()) for key in list(file.keys())}
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensors = {key: _random(key, shape, generator) for key, shape in (known | model.add(known)).items()}
    save_file(tensors, str(path), {"format": "pt"})


def _save(whole: Any, directory: str) -> None:
    from safetensors.torch import save_file

    if type(whole).__module__.startswith("transformers."):
        whole.save_pretrained(directory)  # under the names of the published checkpoints, which its own need not be
        return
    whole.config.save_pretrained(directory)  # Bridge's own classes were written for an older transformers
    save_file(whole.state_dict(), Path(directory) / "model.safetensors", {"format": "pt"})


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("linear_attn.norm.weight"):  # Bridge moves it by one, in bf16; these survive the way back
        return (1 + torch.randint(-64, 64, shape, generator=generator) / 128).to(torch.bfloat16)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)

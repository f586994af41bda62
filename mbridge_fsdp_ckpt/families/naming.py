# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Names on disk: numbers are counted over all ranks, and a model's variants share names.

    a rank's name                                           on disk
    experts.local_experts.0.linear_fc1.weight               experts.local_experts.2.linear_fc1.weight     EP rank 1 of 2
    experts.linear_fc1.weight1                              experts.linear_fc1.weight3                    of 4 experts
    decoder.layers.0.mlp.linear_fc2.weight                  decoder.layers.8.mlp.linear_fc2.weight        2nd stage of 8
    output_layer.weight  (tied)                             embedding.word_embeddings.weight              last stage
    mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight      mtp.layers.0.transformer_layer.mlp...
    mixer.conv1d.weight                                     mixer.conv1d_weight                           core 0.18
    self_attention.linear_qkv_down_proj.layer_norm_weight   input_layernorm.weight                        fused MLA
    mlp._orig_mod.linear_fc2.weight                         mlp.linear_fc2.weight                         torch.compile

The convolution of a Mamba layer is two parameters of the mixer's from core 0.19 on.  The names of multi-token
prediction and of fused MLA are Megatron-Core's for `torch_dist`; newer releases use them for `fsdp_dtensor` too
(Megatron-LM pull request 6271).  Layer numbers come from the layers themselves (`layer_number`, from one), as in
Megatron-Core's `TransformerBlock.sharded_state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.families.latent_attention import FUSED
from mbridge_fsdp_ckpt.families.mamba import is_mixer
from mbridge_fsdp_ckpt.families.wrapping import unwrapped

_GROUPED_EXPERT = re.compile(r"(linear_fc[12]\.(?:weight|bias))(\d+)$")
_ABSORBED_NORM = re.compile(rf"self_attention\.{FUSED}\.layer_norm_(?=(?:weight|bias)$)")
_CONVOLUTION = re.compile(r"\.conv1d\.(?=(?:weight|bias)$)")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Naming:
    """Names on disk of one rank's model.

    Args:
        modules: The model's modules by dotted name (`wrapping.unwrapped_modules`).
        expert_rank: Expert-parallel rank.
        stages: Pipeline-parallel size.  With one stage, layer numbers are global as they are.
    """

    modules: Mapping[str, Any]
    expert_rank: int = 0
    stages: int = 1

    def on_disk(self, name: str, root: str = "") -> str:
        """A parameter's or buffer's name on disk.

        Args:
            name: Its dotted name below `root`.
            root: The module that the name starts from.
        """
        path, first_expert = unwrapped(root), 0
        parts: list[str] = []
        name = unwrapped(name)
        for part in name.split("."):
            parent, path = self.modules.get(path), f"{path}.{part}" if path else part
            module = self.modules.get(path)
            if part == "experts":
                first_expert = self.expert_rank * int(getattr(module, "num_local_experts", 0))
            local_expert = part.isdigit() and parts[-1:] == ["local_experts"]
            parts.append(str(first_expert + int(part)) if local_expert else self._part(part, parent, module))
        named = _ABSORBED_NORM.sub("input_layernorm.", ".".join(parts))
        if is_mixer(self.modules.get(_CONVOLUTION.split(path)[0])):
            named = _CONVOLUTION.sub(".conv1d_", named)
        if self.is_copy(name, root):
            named = named.removesuffix(_OUTPUT) + _EMBEDDING if named.endswith(_OUTPUT) else named
        return _GROUPED_EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", named) if first_expert else named

    def _part(self, part: str, parent: Any, module: Any) -> str:
        if part == "mtp_model_layer" and getattr(parent, "mtp_layer_pattern", None) is None:
            return "transformer_layer"
        if not part.isdigit():
            return part
        number = getattr(module, "layer_number", None)
        if self.stages > 1 and isinstance(number, int):
            return str(number - 1)
        return part

    def is_copy(self, name: str, root: str = "") -> bool:
        """Whether this is a later pipeline stage's copy of tied embeddings, which the first stage writes."""
        path = unwrapped(f"{root}.{name}" if root else name)
        if self.stages == 1 or not path.endswith((_EMBEDDING, _OUTPUT)):
            return False
        owner = self.modules.get(path.removesuffix(_EMBEDDING).removesuffix(_OUTPUT).rstrip("."))
        tied = getattr(owner, "share_embeddings_and_output_weights", False)
        return not getattr(owner, "pre_process", True) and (tied or path.endswith(_EMBEDDING))


def is_expert_name(name: str) -> bool:
    """Whether Megatron-FSDP shards this parameter over the expert mesh.

    The rule is Megatron-FSDP's own (`_get_parameter_groups`: ".experts." in the name); shared experts are dense.
    """
    return ".experts." in f".{name}"

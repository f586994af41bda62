# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (DeepSeek): a fused down-projection holds that of queries and that of keys and values."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.errors import FamilyError
from mbridge_fsdp_ckpt.families.declaration import ParameterContext, Segment

FUSED, QUERY, KEY_VALUE = "linear_qkv_down_proj", "linear_q_down_proj", "linear_kv_down_proj"


class LatentAttentionFamily:
    """`linear_qkv_down_proj.{weight,bias}` of Megatron-Core's `FusedMLASelfAttention`.

    On disk they are the two projections of `MLASelfAttention`, so that fused and unfused models read each other's
    checkpoints; the fused module's own `sharded_state_dict`, and newer releases for `fsdp_dtensor`, do the same.
    """

    name = "latent_attention"
    version = 1

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """Queries, then keys and values."""
        if parameter.child_name(0) != FUSED or parameter.leaf not in ("weight", "bias"):
            return None
        config: Any = getattr(parameter.ancestor(1), "config", None)
        if getattr(config, "q_lora_rank", None) is None:
            return None
        query, key_value = config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim
        rows, total = parameter.local_shape[0], query + key_value
        if query * rows % total:
            raise FamilyError(
                expected=f"a part of {query} rows of queries and {key_value} of keys and values that TP can cut evenly",
                found=f"{rows} rows on one TP rank",
                remedy="Choose a tensor-parallel size that divides q_lora_rank and kv_lora_rank + qk_pos_emb_head_dim.",
                key=parameter.name,
            )
        own = query * rows // total
        return Segment("", own, module=QUERY), Segment("", rows - own, module=KEY_VALUE)

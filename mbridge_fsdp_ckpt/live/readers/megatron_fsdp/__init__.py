# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP v1: the only folder of `live` that knows Megatron-Core."""

from mbridge_fsdp_ckpt.live.readers.megatron_fsdp.layouts import (
    both_parameters,
    find_fsdp_module,
    model_parameters,
    naming_of,
    tensor_parallel_dim,
    tensors_of,
    whole_layout,
)
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp.reader import MegatronFsdpReader

__all__ = [
    "MegatronFsdpReader",
    "both_parameters",
    "find_fsdp_module",
    "model_parameters",
    "naming_of",
    "tensor_parallel_dim",
    "tensors_of",
    "whole_layout",
]

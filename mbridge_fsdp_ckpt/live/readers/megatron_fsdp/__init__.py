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
from mbridge_fsdp_ckpt.live.readers.protocol import ModelParameter
from mbridge_fsdp_ckpt.live.tensors import local_shard

__all__ = [
    "MegatronFsdpReader",
    "ModelParameter",
    "both_parameters",
    "find_fsdp_module",
    "local_shard",
    "model_parameters",
    "naming_of",
    "tensor_parallel_dim",
    "tensors_of",
    "whole_layout",
]

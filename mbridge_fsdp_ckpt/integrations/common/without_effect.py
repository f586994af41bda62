# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Fields of `megatron.training`'s checkpoint configuration, which Bridge inherits, without effect here; and why."""

from __future__ import annotations

_LOCAL = "Of local checkpoints, which are refused."
_SHARED = "Ranks that hold the same always share what is written evenly, and write without asking each other."
_READ = "Of `torch_dist`. `Settings.share_reads` decides who reads for whom."
_PROCESS = "Of stock's process for asynchronous saves, which is not started: this package has its own."
_LAYOUT = "Of `torch_dist`. A checkpoint of this format always loads in another layout."

WITHOUT_EFFECT = {
    "load_main_params_from_ckpt": "Main weights always come from the checkpoint.",
    "non_persistent_local_ckpt_dir": _LOCAL,
    "non_persistent_local_ckpt_algo": _LOCAL,
    "replication": _LOCAL,
    "replication_jump": _LOCAL,
    "replication_factor": _LOCAL,
    "auto_detect_ckpt_format": "What wrote a directory, this format or stock `fsdp_dtensor`, is always read from it.",
    "ckpt_convert_update_legacy_dist_opt_format": "Of checkpoints from before February 2024 in other formats.",
    "use_persistent_ckpt_worker": _PROCESS,
    "async_ckpt_cpu_priority": _PROCESS,
    "async_ckpt_io_priority": _PROCESS,
    "async_ckpt_use_cpu_shm": "An asynchronous save always copies into shared memory of the host.",
    "ckpt_fully_parallel_load_exchange_algo": _READ,
    "ckpt_fully_parallel_save_process_group": _SHARED,
    "ckpt_fully_parallel_load_process_group": _READ,
    "ckpt_assume_constant_structure": "Each save compares the structure, and plans again where it has changed.",
    "ckpt_load_validate_sharding_integrity": "A load always checks that every element is there, and once.",
    "dist_ckpt_strictness": "Of `torch_dist`. `Settings.allow_missing` and `Settings.allow_unexpected` name keys that "
    "may differ; all others have to fit.",
    "dist_ckpt_save_pre_mcore_014": "Of `torch_dist`.",
    "dist_ckpt_optim_fully_reshardable": _LAYOUT,
    "distrib_optim_fully_reshardable_mem_efficient": _LAYOUT,
    "dist_ckpt_workers": "Each rank writes its share by itself.",
}
"""By name; each has the same name, and the same default, in both."""

FULLY_PARALLEL_SAVE, FULLY_PARALLEL_LOAD = _SHARED, _READ
PROCESS = _PROCESS
STRICT = "A load is always strict; `Settings.allow_missing` names keys that may be absent."

STREAMED = "Of `torch_dist`: what is loaded here are main weights, which are not quantized."
STREAMED_SINCE, STREAMED_UNTIL = "megatron-core 0.19", "megatron-core 0.20"

COMING = {
    "ckpt_fully_parallel_load_per_rank_objects": _READ,
    "ckpt_pg_tensors_cache_path": _SHARED,
    "ckpt_pg_tensors_cache_create": _SHARED,
}
"""The same of megatron-core 0.20, as its main branch has them in August 2026."""
COMING_SINCE = "megatron-core 0.20"

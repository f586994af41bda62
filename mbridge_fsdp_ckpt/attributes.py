# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What this package touches of objects that upstream hands over: attributes that nobody promises.

`versions.probe` looks them up when an object is first seen; names of modules are in `probes`.
"""

from __future__ import annotations

ATTRIBUTES: dict[str, dict[str, str]] = {
    "a MegatronFSDP module": {
        "live/readers/megatron_fsdp/layouts.py": "get_distributed_index param_and_grad_buffer",
        "live/readers/megatron_fsdp/parallel.py": (
            "ddp_config.data_parallel_sharding_strategy ddp_config.num_distributed_optimizer_instances"
        ),
        "live/readers/megatron_fsdp/reader.py": (
            "install_optimized_model_weights synchronize_param_gather start_param_sync"
        ),
    },
    "a parameter of Megatron-FSDP": {
        "live/readers/megatron_fsdp/layouts.py": "orig_param megatron_fsdp_dist_index.tp_dim",
        "live/mesh.py": (
            "megatron_fsdp_dist_index.dp_shard_dim megatron_fsdp_dist_index.dp_outer_dim megatron_fsdp_dist_index."
            "use_hybrid_fsdp megatron_fsdp_dist_index.hsdp_outer_dp_shard megatron_fsdp_dist_index.get_root_mesh"
        ),
    },
    "a HybridDeviceOptimizer": {
        "live/optimizer/hybrid.py": (
            "param_to_inner_param sub_optimizers _sync_hdo_param_groups_to_sub_optimizers "
            "_sync_sub_optimizers_state_to_hdo"
        ),
    },
    "a FusedAdam": {
        "live/optimizer/fused_adam.py": (
            "_dummy_overflow_buf _scales capturable get_unscaled_state initialize_state name_to_dtype_map "
            "set_scaled_state store_param_remainders"
        ),
    },
    "a MegatronCheckpointManager": {
        "integrations/verl/plugin.py": "checkpoint_config use_megatron_fsdp role model _load_model_as_hf_via_bridge",
        "integrations/verl/manager.py": (
            "checkpoint_load_contents checkpoint_save_contents get_rng_state lr_scheduler optimizer "
            "previous_global_step provider should_load_extra should_load_hf_model should_load_model "
            "should_load_optimizer should_save_extra should_save_model should_save_optimizer"
        ),
        "integrations/verl/restoration.py": "use_checkpoint_opt_param_scheduler",
    },
}
"""By what an object is, in words, and file: dotted attributes, with spaces between them."""

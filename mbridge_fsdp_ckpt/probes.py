# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What this package touches of others: names that nobody upstream promises, and who here needs them.

`versions` looks them up before they are first needed.  Attributes of objects are in `attributes`.  What a version may
lack, because we can do without, is no probe and has a seam of its own (`integrations.bridge.differences`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal[
    "save and load",
    "Megatron-FSDP",
    "DTensors",
    "corrections",
    "FP8 state",
    "random states",
    "Bridge",
    "plain models",
    "estimate",
    "FusedAdam",
    "conversion",
    "torch_dist",
    "Megatron-LM",
    "Megatron-LM's arguments",
    "Megatron-LM's arguments in YAML",
    "megatron.training",
    "VeRL",
]
"""What a caller is about to do."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one file needs of one module.

    Args:
        file: The file, below this package.
        module: The module; it is imported.
        names: Dotted names in it, with spaces between them, each with what it is called with by name:
            "TRACKER_PREFIX load_checkpoint(strict,pg_collection)".
    """

    file: str
    module: str
    names: str


_DCP = "torch.distributed.checkpoint"
_TRAINING = "megatron.bridge.training"
_LM = "megatron.training"

_TOUCHED: dict[Need, dict[str, dict[str, str]]] = {
    "save and load": {
        "coordination/incarnation.py": {"torch.distributed.distributed_c10d": "_get_default_store"},
        "loading/connections.py": {
            "torch.distributed.distributed_c10d": "ProcessGroupGloo._Options ProcessGroupGloo.create_default_device",
        },
        "format/payload.py": {"torch.serialization": "get_crc32_options set_crc32_options"},
        "dcp/writer.py": {f"{_DCP}._nested_dict": "flatten_state_dict"},
        "dcp/metadata.py": {f"{_DCP}.filesystem": "_StorageInfo CURRENT_DCP_VERSION"},
        "live/optimizer/base.py": {
            "torch.distributed.tensor": "DTensor.from_local(device_mesh,placements,shape,stride)",
        },
    },
    "DTensors": {
        "live/readers/dtensor.py": {
            "torch.distributed.fsdp": "FSDPModule.reshard",
            "torch.distributed.tensor": "DTensor Replicate Shard",
            "torch.distributed.tensor.placement_types": "_StridedShard",
        },
        "live/readers/holders.py": {"torch.distributed.device_mesh": "DeviceMesh._get_root_mesh"},
    },
    "Megatron-FSDP": {
        "live/readers/megatron_fsdp/parallel.py": {
            "megatron.core.parallel_state": (
                "model_parallel_is_initialized get_tensor_model_parallel_rank "
                "get_tensor_model_parallel_world_size get_pipeline_model_parallel_rank "
                "get_pipeline_model_parallel_world_size get_context_parallel_rank "
                "get_context_parallel_world_size get_expert_model_parallel_rank "
                "get_expert_model_parallel_world_size get_expert_tensor_parallel_world_size "
                "get_data_parallel_rank "
                "get_data_parallel_world_size"
            ),
        },
    },
    "corrections": {
        "upstream_fixes/corrections.py": {
            "megatron.core.optimizer": "HybridDeviceOptimizer",
            "megatron.core.distributed.finalize_model_grads": "_get_main_grad_attr",
        },
        "upstream_fixes/hybrid_optimizer.py": {
            "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": (
                "HybridDeviceOptimizer._init_sub_optimizers "
                "HybridDeviceOptimizer._get_sub_optimizer_param_groups "
                "HybridDeviceOptimizer._set_sub_optimizer_grads "
                "HybridDeviceOptimizer._register_param_copy_back_gpu_hook "
                "HybridDeviceOptimizer.update_fp32_param_by_new_param"
            ),
        },
    },
    "FP8 state": {"live/fp8/state.py": {"transformer_engine.common.recipe": "DelayedScaling Format"}},
    "random states": {
        "integrations/common/restoration.py": {
            "megatron.core.tensor_parallel": (
                "convert_cuda_rng_state(to_graphable) get_cuda_rng_tracker is_graph_safe_cuda_rng_tracker"
            ),
        },
    },
    "Bridge": {
        "integrations/common/options.py": {"megatron.core.rerun_state_machine": "RerunState"},
        "integrations/bridge/plugin.py": {
            f"{_TRAINING}.config": "ConfigContainer.validate",
            f"{_TRAINING}.state": "GlobalState.initialize_async_checkpoint_worker",
            f"{_TRAINING}.checkpointing": (
                "maybe_finalize_async_save(global_state,ckpt_cfg,blocking,terminate) "
                "create_checkpoint_manager(checkpoint_config)"
            ),
            "megatron.bridge.utils.instantiate_utils": "target_allowlist.add_exact target_allowlist.remove_exact",
        },
        "integrations/bridge/manager.py": {
            f"{_TRAINING}.checkpointing": (
                "save_checkpoint(state,model,optimizer,opt_param_scheduler,num_floating_point_operations_so_far) "
                "load_checkpoint(strict,checkpointing_context,skip_load_to_model_and_opt,pg_collection) "
                "_load_checkpoint_from_path(load_dir,state,model,optimizer,opt_param_scheduler) "
                "get_rng_state(pg_collection)"
            ),
            f"{_TRAINING}.fault_tolerance": (
                "on_checkpointing_start on_checkpointing_end(global_state,is_async_finalization) "
                "on_checkpoint_loaded(is_local_chkpt,global_state)"
            ),
            f"{_TRAINING}.utils.checkpoint_utils": "get_checkpoint_name",
            f"{_TRAINING}.utils.pg_utils": "get_pg_collection",
            "megatron.bridge.utils.common_utils": "print_rank_0",
            "megatron.core.utils": "unwrap_model",
        },
        "integrations/bridge/restoration.py": {
            f"{_TRAINING}.checkpointing": "set_checkpoint_version",
            f"{_TRAINING}.state": "TrainState",
            "megatron.core.num_microbatches_calculator": "update_num_microbatches(consumed_samples,verbose)",
        },
        "integrations/bridge/locate.py": {
            f"{_TRAINING}.utils.checkpoint_utils": (
                "get_checkpoint_name checkpoint_exists is_checkpoint_iteration_directory"
            ),
        },
        "integrations/bridge/run_files.py": {
            f"{_TRAINING}.utils.checkpoint_utils": (
                "get_checkpoint_run_config_filename get_checkpoint_train_state_filename"
            ),
            f"{_TRAINING}.checkpointing": "save_tokenizer_assets",
            f"{_LM}.config.container": "ConfigContainerBase.to_dict ConfigContainerBase._convert_value_to_dict",
            "megatron.bridge.utils.common_utils": "get_rank_safe",
            "megatron.bridge.utils.yaml_utils": "safe_yaml_representers",
        },
        "integrations/bridge/after_save.py": {
            f"{_TRAINING}.checkpointing": "append_to_progress_log maybe_save_dataloader_state(pg_collection)",
            f"{_TRAINING}.callbacks": "CallbackContext should_fire",
            f"{_TRAINING}.utils.wandb_utils": "on_save_checkpoint_success(wandb_writer)",
            f"{_TRAINING}.utils.mlflow_utils": "on_save_checkpoint_success(mlflow_logger)",
            f"{_TRAINING}.utils.comet_utils": "on_save_checkpoint_success(comet_logger)",
            "megatron.bridge.utils.common_utils": "get_rank_safe is_last_rank print_rank_0",
        },
        "integrations/bridge/conversion_seams.py": {
            f"{_TRAINING}.model_load_save": (
                "save_megatron_model(ckpt_format,low_memory_save) "
                "build_and_load_model(checkpoint_path,model_cfg,skip_temp_dist_context)"
            ),
            f"{_TRAINING}.checkpointing": (
                "_load_model_weights_from_checkpoint(checkpoint_path,model,return_state_dict)"
            ),
            "megatron.bridge": "AutoBridge.load_megatron_model(path)",
        },
        "integrations/bridge/differences.py": {
            f"{_TRAINING}.optim": "",
            f"{_TRAINING}.checkpointing": "_NON_PERSISTENT_CKPT_SUBDIR",
        },
        "upstream_fixes/bridge_export.py": {
            "megatron.bridge.models.conversion.param_mapping": ("_module_uses_fsdp ChunkedMapping MambaInProjMapping"),
        },
        "upstream_fixes/full_dim_norms.py": {
            "megatron.bridge.models.minimax_m2.minimax_m2_provider": "_FullDimRMSNorm",
            "megatron.core.tensor_parallel.layers": "set_tensor_model_parallel_attributes(is_parallel,dim,stride)",
        },
    },
    "plain models": {
        "integrations/bridge/plain_model.py": {
            "megatron.core.utils": "get_model_config",
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter": "",
        },
    },
    "estimate": {
        "tools/estimate/model.py": {
            "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer": (
                "BucketingPolicy _get_parameter_groups DataParallelBuffer._get_item_slice_in_shard "
                "_get_dp_buffer_shard_bucket_index build_data_parallel_buffer_index"
            ),
            "torch.testing._internal.distributed.fake_pg": "FakeStore",
        },
    },
    "FusedAdam": {"tools/estimate/job.py": {"transformer_engine.pytorch.optimizers": "FusedAdam.initialize_state"}},
    "conversion": {
        "integrations/bridge/without_gpu.py": {
            "megatron.core.ssm.mamba_mixer": "HAVE_MAMBA_SSM",
            "megatron.core.tensor_parallel.random": "CudaRNGStatesTracker.fork",
        },
        "tools/convert/accounting.py": {
            "megatron.bridge.models.conversion.model_bridge": "_megatron_local_name_to_global",
        },
        "tools/convert/hugging_face.py": {
            "megatron.bridge": "AutoBridge.from_hf_pretrained AutoBridge.to_megatron_provider(load_weights)",
            f"{_TRAINING}.model_load_save": "save_megatron_model(ckpt_format,hf_tokenizer_path,hf_tokenizer_kwargs)",
        },
    },
    "torch_dist": {
        "tools/convert/torch_dist/unsharded.py": {
            "megatron.core.optimizer": "_get_param_groups get_standard_config_overrides",
            f"{_TRAINING}.model_load_save": "load_model_config",
            f"{_TRAINING}.utils.checkpoint_utils": "read_run_config",
            "megatron.bridge.utils.instantiate_utils": "instantiate",
        },
        "tools/convert/torch_dist/arguments.py": {
            f"{_TRAINING}.mlm_compat.arguments": "_transformer_config_from_args(args)",
            f"{_TRAINING}.mlm_compat.model": "_gpt_provider(args)",
            "megatron.core.tensor_parallel": "set_defaults_if_not_set_tensor_model_parallel_attributes",
            "megatron.core.optimizer": "OptimizerConfig",
            "megatron.core.transformer.module": "Float16Module",
        },
        "tools/convert/torch_dist/description.py": {
            "megatron.core.dist_checkpointing.dict_utils": "nested_values",
            "megatron.core.dist_checkpointing.mapping": "ShardedTensor ShardedTensorFactory",
        },
    },
    "Megatron-LM": {
        "integrations/common/options.py": {"megatron.core.rerun_state_machine": "RerunState"},
        "integrations/megatron_lm/plugin.py": {
            f"{_LM}.checkpointing": "save_checkpoint load_checkpoint load_args_from_checkpoint(args)",
            f"{_LM}.async_utils": "maybe_finalize_async_save",
        },
    },
    "Megatron-LM's arguments": {
        "integrations/megatron_lm/plugin.py": {f"{_LM}.arguments": "add_megatron_arguments validate_args"}
    },
    "Megatron-LM's arguments in YAML": {
        "integrations/megatron_lm/plugin.py": {f"{_LM}.yaml_arguments": "validate_yaml"}
    },
    "megatron.training": {
        "integrations/megatron_lm/checkpointing.py": {
            f"{_LM}.checkpointing": (
                "get_checkpoint_name(release,return_base_dir) get_rng_state(tp_group,pp_group) "
                "maybe_save_dataloader_state set_checkpoint_version get_checkpoint_version "
                "set_loaded_iteration check_checkpoint_args _CHECKPOINT_VERSION"
            ),
            _LM: "get_args",
            f"{_LM}.utils": "is_last_rank print_rank_0",
            f"{_LM}.ft_integration": (
                "on_checkpointing_start on_checkpointing_end(is_async_finalization) on_checkpoint_loaded"
            ),
            f"{_LM}.one_logger_utils": "on_save_checkpoint_start",
            f"{_LM}.wandb_utils": "on_load_checkpoint_success",
            "megatron.core.num_microbatches_calculator": "update_num_microbatches(consumed_samples,verbose)",
            "megatron.core.process_groups_config": "ProcessGroupCollection.use_mpu_process_groups",
            "megatron.core.utils": "unwrap_model",
        },
        "integrations/megatron_lm/following.py": {
            f"{_LM}.checkpointing": "get_checkpoint_name(return_base_dir)",
            f"{_LM}.utils": "append_to_progress_log(barrier) is_last_rank print_rank_0",
            f"{_LM}.one_logger_utils": "on_save_checkpoint_success",
            f"{_LM}.wandb_utils": "on_save_checkpoint_success",
        },
        "integrations/megatron_lm/plugin.py": {_LM: "get_args"},
    },
    "VeRL": {
        "integrations/verl/plugin.py": {
            "verl.utils.checkpoint.megatron_checkpoint_manager": (
                "MegatronCheckpointManager._save_megatron_fsdp_checkpoint(dist_checkpoint_path) "
                "MegatronCheckpointManager._load_megatron_fsdp_checkpoint(local_path,del_local_after_load) "
                "MegatronCheckpointManager._dispatch_finalize(async_requests,finalize_save_fn) "
                "get_hf_model_checkpoint_path get_model_dist_checkpoint_path"
            ),
            "verl.workers.engine.megatron.transformer_impl": (
                "MegatronEngine._build_optimizer offload_megatron_model_to_cpu offload_megatron_optimizer"
            ),
        },
        "integrations/verl/config.py": {"verl.workers.config": "McoreCheckpointConfig"},
        "integrations/verl/restoration.py": {
            "megatron.core.process_groups_config": "ProcessGroupCollection.use_mpu_process_groups"
        },
    },
}
"""By need, file and module: the names, as `Probe` has them."""

PROBES = {
    need: tuple(Probe(file, module, names) for file, of in files.items() for module, names in of.items())
    for need, files in _TOUCHED.items()
}
"""In the order in which they are looked up."""

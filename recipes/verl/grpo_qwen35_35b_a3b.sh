#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# GRPO of Qwen3.5-35B-A3B with VeRL 0.9.1 in the layout of Megatron-LM issue 4910: 32 GPUs, TP 2, CP 2, EP 8,
# Megatron-FSDP, the whole optimizer offloaded to the CPU; vLLM generates.  Run it once, on a node of a Ray cluster of 4
# nodes with 8 GPUs each; arguments are further overrides.
#
#   MODEL_PATH=/models/Qwen3.5-35B-A3B TRAIN_FILES=/data/train.parquet VAL_FILES=/data/test.parquet \
#       CHECKPOINTS=/scratch/grpo recipes/verl/grpo_qwen35_35b_a3b.sh trainer.total_epochs=2
set -euo pipefail

: "${MODEL_PATH:?a directory with the Hugging Face model, which all nodes see}"
: "${TRAIN_FILES:?parquet files of prompts}" "${VAL_FILES:?parquet files of prompts}"
: "${CHECKPOINTS:?a directory on a file system that all nodes share}"

# VeRL gives Megatron's workers CUDA_DEVICE_MAX_CONNECTIONS=1; under Megatron-FSDP it must be another number.
exec python3 -m verl.trainer.main_ppo \
  model_engine=megatron \
  '+ray_kwargs.ray_init.runtime_env.env_vars.CUDA_DEVICE_MAX_CONNECTIONS="32"' \
  actor_rollout_ref.actor.checkpoint._target_=mbridge_fsdp_ckpt.integrations.verl.config.SafeCheckpointConfig \
  'actor_rollout_ref.actor.checkpoint.save_contents=["model","optimizer","extra"]' \
  actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True \
  algorithm.adv_estimator=grpo \
  data.train_files="$TRAIN_FILES" \
  data.val_files="$VAL_FILES" \
  data.train_batch_size=128 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.megatron.use_megatron_fsdp=True \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.context_parallel_size=2 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  +actor_rollout_ref.actor.megatron.override_ddp_config.megatron_fsdp_use_decoupled_grad=True \
  +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True \
  +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather=True \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \
  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.0 \
  +actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True \
  +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True \
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.ref.megatron.context_parallel_size=2 \
  actor_rollout_ref.ref.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.n=8 \
  trainer.nnodes=4 \
  trainer.n_gpus_per_node=8 \
  trainer.default_local_dir="$CHECKPOINTS" \
  trainer.save_freq=20 \
  trainer.max_actor_ckpt_to_keep=3 \
  trainer.resume_mode=auto \
  'trainer.logger=["console"]' \
  trainer.test_freq=20 \
  "$@"

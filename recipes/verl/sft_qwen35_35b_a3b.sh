#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# SFT of Qwen3.5-35B-A3B with VeRL 0.9.1, as in Megatron-LM issue 4910: 32 GPUs, TP 2, CP 2, EP 8, Megatron-FSDP, the
# whole optimizer offloaded to the CPU.  Run it on each of 4 nodes; arguments are further overrides.
#
#   NODE_RANK=0 MASTER_ADDR=host0 MODEL_PATH=/models/Qwen3.5-35B-A3B TRAIN_FILES=/data/train.parquet \
#       CHECKPOINTS=/scratch/sft recipes/verl/sft_qwen35_35b_a3b.sh trainer.total_epochs=2
set -euo pipefail

: "${MODEL_PATH:?a directory with the Hugging Face model, which all nodes see}"
: "${TRAIN_FILES:?parquet files of messages}"
: "${CHECKPOINTS:?a directory on a file system that all nodes share}"
: "${MASTER_ADDR:?the host of node 0}" "${NODE_RANK:?0 to 3}"

export CUDA_DEVICE_MAX_CONNECTIONS=32  # Megatron-FSDP overlaps communication on streams of its own: not 1

exec torchrun --nnodes 4 --nproc-per-node 8 --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
  -m verl.trainer.sft_trainer \
  engine=megatron optim=megatron \
  checkpoint._target_=mbridge_fsdp_ckpt.integrations.verl.config.SafeCheckpointConfig \
  'checkpoint.save_contents=["model","optimizer","extra"]' \
  optim.use_checkpoint_opt_param_scheduler=True \
  model.path="$MODEL_PATH" \
  data.train_files="$TRAIN_FILES" \
  data.train_batch_size=128 \
  data.max_length=8192 \
  data.max_token_len_per_gpu=8192 \
  engine.use_megatron_fsdp=True \
  engine.tensor_model_parallel_size=2 \
  engine.context_parallel_size=2 \
  engine.expert_model_parallel_size=8 \
  engine.expert_tensor_parallel_size=1 \
  +engine.override_ddp_config.megatron_fsdp_use_decoupled_grad=True \
  +engine.override_ddp_config.overlap_grad_reduce=True \
  +engine.override_ddp_config.overlap_param_gather=True \
  engine.override_transformer_config.recompute_granularity=full \
  engine.override_transformer_config.recompute_method=uniform \
  engine.override_transformer_config.recompute_num_layers=1 \
  optim.lr=1e-5 \
  optim.lr_warmup_steps_ratio=0.03 \
  optim.lr_decay_style=cosine \
  +optim.override_optimizer_config.optimizer_cpu_offload=True \
  +optim.override_optimizer_config.optimizer_offload_fraction=1.0 \
  +optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True \
  +optim.override_optimizer_config.use_precision_aware_optimizer=True \
  trainer.default_local_dir="$CHECKPOINTS" \
  trainer.save_freq=100 \
  trainer.max_ckpt_to_keep=3 \
  trainer.resume_mode=auto \
  'trainer.logger=["console"]' \
  trainer.nnodes=4 \
  trainer.n_gpus_per_node=8 \
  "$@"

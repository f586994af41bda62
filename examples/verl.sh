#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# Fine-tune with VeRL on the 8 GPUs of one node, under Megatron-FSDP; started again, it resumes.  Arguments are further
# overrides.  recipes/verl/ has launch scripts for GRPO and SFT of Qwen3.5-35B-A3B on 32 GPUs.
#
#   MODEL_PATH=/models/Qwen3-8B TRAIN_FILES=/data/train.parquet CHECKPOINTS=/scratch/sft examples/verl.sh
set -euo pipefail

: "${MODEL_PATH:?a directory with the Hugging Face model}"
: "${TRAIN_FILES:?parquet files of messages}"
: "${CHECKPOINTS:?a directory for the checkpoints}"

export CUDA_DEVICE_MAX_CONNECTIONS=32 # Megatron-FSDP overlaps communication on streams of its own: not 1

# The line with _target_ chooses the format; nothing else of this package is needed.
exec torchrun --standalone --nproc-per-node 8 -m verl.trainer.sft_trainer \
  engine=megatron optim=megatron \
  engine.use_megatron_fsdp=True \
  checkpoint._target_=mbridge_fsdp_ckpt.integrations.verl.config.SafeCheckpointConfig \
  'checkpoint.save_contents=["model","optimizer","extra"]' \
  optim.use_checkpoint_opt_param_scheduler=True \
  model.path="$MODEL_PATH" \
  data.train_files="$TRAIN_FILES" \
  trainer.default_local_dir="$CHECKPOINTS" \
  trainer.save_freq=100 \
  trainer.resume_mode=auto \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  "$@"

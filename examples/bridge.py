# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Pre-train with Megatron-Bridge; started again, the run goes on from its last checkpoint.

torchrun --nproc-per-node 2 examples/bridge.py checkpoint.save=/scratch/run checkpoint.load=/scratch/run

Arguments are settings of Bridge's configuration, in Hydra's syntax.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F

import mbridge_fsdp_ckpt


def configuration() -> Any:
    """A small GPT on mock data under Megatron-FSDP."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import CheckpointConfig, MockGPTDatasetConfig, TokenizerConfig

    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        position_embedding_type="rope",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.dataset = MockGPTDatasetConfig(
        random_seed=1234,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=32,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        skip_getting_attention_mask_from_dataset=True,
    )
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 4, 8, 1
    config.validation.eval_iters = 0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 100
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.ddp.use_megatron_fsdp = True
    config.checkpoint = CheckpointConfig(
        save="checkpoints", load="checkpoints", save_interval=2, ckpt_format="fsdp_dtensor_safe"
    )
    return config


def main() -> None:
    """Train as the configuration and the command line say."""
    mbridge_fsdp_ckpt.register()  # before the configuration is validated and the optimizer is built
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    config = process_config_with_overrides(configuration(), cli_overrides=sys.argv[1:])
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()

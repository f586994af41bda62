# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the recipes have in common: Bridge's defaults, Megatron-FSDP, our format, and how a model is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME

SEQUENCE = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread over the ranks; Megatron-FSDP shards over what is left of them.

    Args:
        tensor: Tensor-parallel size; above 1, sequences are parallel too.
        context: Context-parallel size.
        expert: Expert-parallel size; experts are not cut by tensor parallelism.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1

    def apply(self, model: Any) -> None:
        """Set it in Bridge's description of a model."""
        model.tensor_model_parallel_size, model.sequence_parallel = self.tensor, self.tensor > 1
        model.context_parallel_size = self.context
        if model.num_moe_experts:
            model.expert_model_parallel_size, model.expert_tensor_parallel_size = self.expert, 1


def pretraining(model: Any, layout: Layout) -> Any:
    """A configuration of Bridge that pre-trains a model from random weights, on mock data until `dataset` is changed.

    Args:
        model: Bridge's provider; it is changed.
        layout: How it is spread.
    """
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import MockGPTDatasetConfig, TokenizerConfig

    config = _pretrain_common()
    _complete(config, model, layout)
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1)
    config.dataset = MockGPTDatasetConfig(
        random_seed=1234,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=model.seq_length,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        skip_getting_attention_mask_from_dataset=True,
    )
    config.train.train_iters, config.train.global_batch_size = 100, 256
    config.scheduler.lr_warmup_iters = 10
    return config


def finetuning(model: Any, layout: Layout) -> Any:
    """A configuration of Bridge that fine-tunes all weights of a pretrained checkpoint on prompts and answers.

    The user names the checkpoint, the directory of `training.jsonl` and the tokenizer: see `REQUIRED`.

    Args:
        model: Bridge's provider; it is changed.
        layout: How it is spread.
    """
    from megatron.bridge.recipes.common import _sft_common

    config = _sft_common()
    _complete(config, model, layout)
    config.dataset = _prompts_and_answers(seq_length=model.seq_length, do_validation=False, do_test=False)
    model.calculate_per_token_loss = True  # sequences have different numbers of answer tokens
    config.ddp.average_in_collective = False
    config.train.train_iters, config.train.global_batch_size = 1000, 128
    return config


REQUIRED = {
    "checkpoint.pretrained_checkpoint": "the directory of a checkpoint to start from",
    "dataset.dataset_root": "the directory that holds training.jsonl",
    "tokenizer.tokenizer_model": "the directory of a Hugging Face tokenizer",
}
"""What only the user of a fine-tuning recipe knows."""


def _prompts_and_answers(**settings: Any) -> Any:
    """Lines of `prompt` and `completion`; Bridge 0.5 has another class for them, and other columns by default."""
    from megatron.bridge.data import builders
    from megatron.bridge.training import config

    if hasattr(builders, "GPTSFTDatasetConfig"):
        preprocessing = builders.PromptCompletionSFTPreprocessingConfig()
        return builders.GPTSFTDatasetConfig(preprocessing=preprocessing, **settings)
    columns = {"prompt_template": "{prompt}{completion}", "label_key": "completion", "truncation_field": "prompt"}
    return config.FinetuningDatasetConfig(dataset_kwargs=columns, **settings)


def offload_optimizer(config: Any) -> None:
    """Keep the whole optimizer in the hosts' memory, as in Megatron-LM issue 4910."""
    optimizer = config.optimizer
    optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction = True, 1.0
    optimizer.overlap_cpu_optimizer_d2h_h2d = True
    optimizer.use_precision_aware_optimizer = config.ddp.megatron_fsdp_use_decoupled_grad = True


def _complete(config: Any, model: Any, layout: Layout) -> None:
    from megatron.bridge.training.config import CheckpointConfig

    layout.apply(model)
    model.seq_length = SEQUENCE
    model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    config.model = model
    config.train.micro_batch_size = 1
    config.validation.eval_iters = 0
    ddp = config.ddp
    ddp.use_megatron_fsdp = ddp.use_distributed_optimizer = True
    ddp.data_parallel_sharding_strategy = "optim_grads_params"
    ddp.overlap_grad_reduce = ddp.overlap_param_gather = True
    config.checkpoint = CheckpointConfig(
        save="checkpoints", load="checkpoints", save_interval=50, ckpt_format=FORMAT_NAME
    )
    config.logger.tensorboard_dir = None

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The tiny models of `testing.models` as configurations of Megatron-Bridge, for `pretrain` on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from testing.models import Recipe, gated_delta_net, layers, settings_of

SEQUENCE = 32


def configuration(recipe: Recipe, steps: int, checkpoint: Any) -> Any:
    """A `ConfigContainer`: mock data, eight samples a step, gloo, Megatron-FSDP, a log line a step.

    Args:
        recipe: The model and its layout; `ddp` and `optimizer_settings` are set in the sections of these names.
        steps: The last step's number.
        checkpoint: A `CheckpointConfig`.
    """
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.config import TokenizerConfig

    config = _pretrain_common()
    config.model, config.dataset, config.checkpoint = provider(recipe), _dataset(), checkpoint
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=recipe.vocabulary - 1)
    config.dist.distributed_backend = "gloo"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = steps, 8, 1
    config.validation.eval_iters, config.validation.eval_interval = 0, 1000
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 100
    config.logger.tensorboard_dir, config.logger.log_interval = None, 1
    of_ddp = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": recipe.strategy,
        "average_in_collective": False,
        "gradient_reduce_div_fusion": False,
        "check_for_nan_in_grad": False,
    }
    of_optimizer: dict[str, Any] = {"lr": 1e-3, "min_lr": 0.0, "clip_grad": 0.0}
    if recipe.offload is not None:
        of_optimizer |= {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
        of_optimizer |= {"optimizer_offload_fraction": recipe.offload}
    vars(config.ddp).update(of_ddp | recipe.ddp)
    vars(config.optimizer).update(of_optimizer | recipe.optimizer_settings)
    return config


def provider(recipe: Recipe) -> Any:
    """Bridge's provider of a recipe's model."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        **settings_of(recipe),
        seq_length=SEQUENCE,
        vocab_size=recipe.vocabulary,
        make_vocab_size_divisible_by=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        deterministic_mode=True,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        pipeline_dtype=torch.bfloat16,
        transformer_layer_spec=mixed_layers if recipe.gated_delta_net else attention_layers,
    )


@contextmanager
def losses_by_step() -> Iterator[dict[int, float]]:
    """While the block runs, the losses that `pretrain` logs, as full floats."""
    from megatron.bridge.training import train

    losses: dict[int, float] = {}
    log = train.training_log

    def noting(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = next(one for one in (*args, *kwargs.values()) if hasattr(one, "train_state"))
        losses[state.train_state.step] = float(loss_dict["lm loss"])
        return log(loss_dict, *args, **kwargs)

    with patch.object(train, "training_log", noting):
        yield losses


def attention_layers(config: Any) -> Any:
    """Layers of attention alone."""
    return layers(config)


def mixed_layers(config: Any) -> Any:
    """Gated DeltaNet in all layers but every third, as in Qwen3.5."""
    return layers(config, gated_delta_net())


def _dataset() -> Any:
    from megatron.bridge.training.config import MockGPTDatasetConfig

    return MockGPTDatasetConfig(
        random_seed=1,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        seq_length=SEQUENCE,
        num_dataset_builder_threads=1,
        data_sharding=True,
        dataloader_type="single",
        num_workers=0,
        skip_getting_attention_mask_from_dataset=False,
    )

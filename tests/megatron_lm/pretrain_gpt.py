# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A script in the shape of Megatron-LM's pretrain_gpt.py, which no package ships.  It knows nothing of this package."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import argument_utils, get_args, pretrain
from megatron.training.arguments import parse_and_validate_args


def datasets(sizes: list[int | None], **_: Any) -> Any:
    """Mock data for training, validation and test."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=[None, None, None],
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def loss(
    mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Summed loss, number of tokens, and both for the log."""
    total = torch.sum(output.float().view(-1) * mask.view(-1).float())
    tokens = mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}


def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """One micro batch."""
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss, batch["loss_mask"])


def model_provider(pre_process: bool, post_process: bool, config: Any = None, pg_collection: Any = None) -> Any:
    """The model, as `GPTModelConfig` builds it, which megatron-core 0.18 has not."""
    args = get_args()
    config = config or argument_utils.core_transformer_config_from_args(args)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
    )


if __name__ == "__main__":
    datasets.is_distributed = True  # type: ignore[attr-defined]
    parsed = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    configure = getattr(argument_utils, "gpt_config_from_args", None)
    pretrain(
        argument_utils.pretrain_cfg_container_from_args(parsed, configure and configure(parsed)),
        train_valid_test_dataset_provider=datasets,
        model_provider=None if configure else model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )

"""A script in the shape of Megatron-LM's pretrain_gpt.py, which no package ships.  It knows nothing of this package."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
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


if __name__ == "__main__":
    datasets.is_distributed = True  # type: ignore[attr-defined]
    parsed = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    container = pretrain_cfg_container_from_args(parsed, gpt_config_from_args(parsed))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Data and a tokenizer for fine-tuning, written offline."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

WORDS = 100


def write_data(directory: Path) -> None:
    """Prompts and answers of random words, as `training.jsonl`."""
    draw = random.Random(0)
    lines = [{"prompt": _words(draw, 4, 12), "completion": _words(draw, 3, 10)} for _ in range(64)]
    directory.mkdir()
    (directory / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _words(draw: random.Random, fewest: int, most: int) -> str:
    return " ".join(f"word{draw.randrange(WORDS)}" for _ in range(draw.randint(fewest, most)))


def write_tokenizer(directory: Path) -> None:
    """A Hugging Face tokenizer that knows those words."""
    from transformers import PreTrainedTokenizerFast

    tokenizers: Any = importlib.import_module("tokenizers")
    words = ["<unk>", "<eos>", "<pad>", *(f"word{number}" for number in range(WORDS))]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(str(directory))

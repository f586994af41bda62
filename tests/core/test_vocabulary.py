# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Embeddings and output layers are padded to a multiple that depends on the layout: a checkpoint loads in any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, oracle

TOKENS = 50
SAVED = Recipe(layers=1, vocabulary=64)
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def save(directory: str, recipe: Recipe, tokens: int | None) -> None:
    trainable = cases.prepared(recipe, steps=2)
    settings = Settings(vocabulary_size=tokens)
    mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)


def load_and_save(directory: str, again: str, recipe: Recipe, tokens: int | None) -> str:
    """Loads and saves again, and says what went wrong; then, nothing may have changed."""
    trainable = cases.prepared(recipe, seed=9)
    settings, before = Settings(vocabulary_size=tokens), oracle.live(trainable)
    try:
        mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
    except CheckpointError as error:
        assert oracle.live(trainable) == before
        return str(error)
    mbridge_fsdp_ckpt.save(again, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
    return ""


@pytest.fixture(scope="module")
def saved(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("padded") / "checkpoint"
    megatron_ranks.run(save, str(directory), SAVED, TOKENS, ranks=2)
    return directory


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"vocabulary": 56, "tensor": 2}), (4, {"vocabulary": 72})],  # others: the matrix of optimizers
)
def test_a_checkpoint_loads_where_the_padding_differs(
    ranks: int, layout: dict[str, Any], megatron_ranks: RankPool, saved: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    results = megatron_ranks.run(load_and_save, str(saved), str(again), SAVED.on(**layout), TOKENS, ranks=ranks)
    assert results == [""] * ranks
    first, second = oracle.tensors_on_disk(saved), oracle.tensors_on_disk(again)
    assert first.keys() == second.keys()
    padded = 0
    for key, tensor in first.items():
        if not any(f"{name}" in key for name in PADDED) or not tensor.dim():
            assert torch.equal(second[key], tensor), key
            continue
        rows = min(len(tensor), len(second[key]))
        assert rows >= TOKENS
        assert torch.equal(second[key][:rows], tensor[:rows]), key
        padded += 1
    assert padded == 6  # two weights with two moments each


@pytest.mark.parametrize(
    ("changes", "tokens", "says"),
    [
        ({"vocabulary": 96}, None, "tokens without padding: 50 there, unknown in vocabulary_size"),
        ({"vocabulary": 96}, 51, "tokens without padding: 50 there, 51 in vocabulary_size"),
        ({"vocabulary": 48}, 50, "shape [64, 32] in the checkpoint, [48, 32] here"),
    ],
)
def test_another_vocabulary_is_no_padding(
    changes: dict[str, Any], tokens: int | None, says: str, megatron_ranks: RankPool, saved: Path
) -> None:
    errors = megatron_ranks.run(load_and_save, str(saved), "", SAVED.on(**changes), tokens, ranks=2)
    assert len(set(errors)) == 1
    assert says in errors[0]
    assert all(name in errors[0] for name in PADDED)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A load fills the memory that the model reads, whatever its strides, or says before anything changes that it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import buffers
from tests.core.test_failures import same_on_all


def test_a_buffer_of_any_strides_gets_the_saved_values(megatron_ranks: RankPool, tmp_path: Path) -> None:
    target = str(tmp_path / "c")
    megatron_ranks.run(buffers.save, target, *buffers.STRIDED, ranks=2)
    for filled in megatron_ranks.run(buffers.load, target, ranks=2):
        assert filled == dict.fromkeys(buffers.STRIDED, True)


@pytest.mark.parametrize("name", buffers.OVERLAPPING)
def test_overlapping_memory_is_refused_before_anything_changes(
    name: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    target = str(tmp_path / "c")
    megatron_ranks.run(buffers.save, target, name, ranks=2)
    text = same_on_all(megatron_ranks.run(buffers.load_overlapping, target, name, ranks=2), "UnsupportedStateError")
    assert f"decoder.{name}" in text
    assert "elements that share memory" in text
    assert ".contiguous()" in text


def test_a_sparse_buffer_is_refused(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(buffers.save_sparse, str(tmp_path / "c"), ranks=2)
    for number in range(2):
        text = same_on_all([result[number] for result in results], "UnsupportedStateError")
        assert "decoder.sparse]" in text
        assert "torch.sparse_coo" in text
        assert ".to_dense()" in text
    assert not (tmp_path / "c").exists()


def test_a_parameter_that_came_after_wrapping_is_named(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(buffers.save_strangers, str(tmp_path / "c"), ranks=2)
    for number, name in enumerate(("layers.0.added", "layers.0.mlp.linear_fc2.weight") * 2):
        text = same_on_all([result[number] for result in results], "ConfigurationError")
        assert f"decoder.{name}]" in text
        assert "shape [4, 5] that was added or replaced since" in text
        assert "before the model is wrapped" in text


def test_a_tensor_that_only_the_state_dict_has_is_refused(megatron_ranks: RankPool, tmp_path: Path) -> None:
    target = str(tmp_path / "c")
    megatron_ranks.run(buffers.save_derived, target, ranks=2)
    text = same_on_all(megatron_ranks.run(buffers.load_derived, target, ranks=2), "UnsupportedStateError")
    assert "decoder.derived.held" in text

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Copies that are alike leave nothing; copies that are not are named, with the ranks that hold them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from mbridge_fsdp_ckpt.coverage.buckets import added, fingerprint
from mbridge_fsdp_ckpt.coverage.plans import Block
from mbridge_fsdp_ckpt.coverage.replicas import Copy, DifferingCopies, is_compared
from mbridge_fsdp_ckpt.errors import CheckpointError, ReplicaMismatchError, UnsupportedStateError
from mbridge_fsdp_ckpt.io.checksums import digest
from mbridge_fsdp_ckpt.io.host_bytes import host_bytes
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.slices import owner
from mbridge_fsdp_ckpt.settings import Settings
from tests.unit import test_saving as saves
from tests.unit.rounds import met
from tests.unit.shards import scalar, shards

WRITER, OTHER, THIRD = owner("weight", 3), (owner("weight", 3) + 1) % 3, (owner("weight", 3) + 2) % 3


def filled(value: float, key: str = "weight", replica: tuple[int, int] = (0, 3)) -> list[LocalShard]:
    """A replica in two blocks, of one value."""
    held = shards(2, 12, key=key, replica=replica)
    for shard in held:
        shard.flat.fill_(value)
    return held


def copies_of(ranks: list[list[LocalShard]], choice: str = "warn") -> list[list[Copy]]:
    return [[copy_of(h) for h in held if is_compared(Block.of(h), choice)] for held in ranks]


def copy_of(shard: LocalShard) -> Copy:
    return Copy(Block.of(shard), digest(host_bytes(shard.elements())))


def sums(seen: list[list[Copy]]) -> list[int]:
    return added(json.loads(json.dumps([fingerprint(rank) for rank in seen])))


def found(ranks: list[list[LocalShard]], choice: str = "warn") -> CheckpointError | None:
    """Both meetings about copies: what is an error if the settings say so."""
    seen = copies_of(ranks, choice)
    total = sums(seen)
    return raised(seen, total) if any(total) else None


def raised(seen: list[list[Copy]], total: list[int]) -> CheckpointError | None:
    try:
        met([DifferingCopies(number, rank, total, lambda: None, "error") for number, rank in enumerate(seen)])
    except CheckpointError as error:
        return error
    return None


def three(values: tuple[float, float, float], key: str = "weight") -> list[list[LocalShard]]:
    return [filled(value, key, (rank, 3)) for rank, value in enumerate(values)]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, float("nan")])
def test_copies_that_are_alike_leave_nothing(value: float) -> None:
    seen = copies_of(three((value, value, value)))
    assert sum(map(len, seen)) == 6
    assert not any(sums(seen))


@pytest.mark.parametrize("unlike", range(3))
def test_one_copy_that_is_unlike_is_named_whoever_holds_it(unlike: int) -> None:
    values = tuple(1.0 + (rank == unlike) for rank in range(3))
    error = found(three(values))  # type: ignore[arg-type]
    assert isinstance(error, ReplicaMismatchError)
    ranks = f"{min(OTHER, THIRD)}, {max(OTHER, THIRD)}" if unlike == WRITER else str(unlike)
    assert error.found == f"model.weight: rank {ranks} differs from rank {WRITER}, which writes it"


def test_the_sign_of_a_zero_is_a_difference() -> None:
    assert found(three((0.0, 0.0, -0.0))) is not None


def test_a_scalar_is_compared() -> None:
    ranks = [[scalar(replica=(rank, 2))] for rank in range(2)]
    ranks[1][0].flat.fill_(3)
    assert "step: rank" in str(found(ranks))


def test_blocks_that_one_rank_holds_are_not_hashed() -> None:
    assert copies_of([filled(1.0, replica=(0, 1))]) == [[]]


def test_a_tensor_that_some_ranks_do_not_hold_is_no_difference() -> None:
    ranks = three((1.0, 1.0, 2.0))[:2]
    assert any(sums(copies_of(ranks)))
    assert found(ranks) is None


def test_a_difference_beyond_the_named_copies_is_one() -> None:
    assert "beyond" in str(raised([[], []], sums(copies_of(three((1.0, 1.0, 2.0))))))


def test_many_keys_are_counted_not_listed() -> None:
    ranks: list[list[LocalShard]] = [[], []]
    for number in range(25):
        for rank in range(2):
            ranks[rank] += filled(float(rank), f"key{number:02d}", (rank, 2))
    text = str(found(ranks))
    assert "key19" in text
    assert "key20" not in text
    assert "5 more keys" in text


AMAX = "layers.0.mlp.linear_fc1.weight_quantizer._amax"


@pytest.mark.parametrize("choice", ["warn", "error", "ignore"])
def test_quantizers_buffers_that_differ_are_refused_whatever_the_setting(choice: str) -> None:
    error = found(three((1.0, 2.0, 1.0), AMAX), choice)
    assert isinstance(error, UnsupportedStateError)
    assert error.key == f"model.{AMAX}"


def test_nothing_else_is_compared_where_the_user_says_so() -> None:
    assert copies_of(three((1.0, 2.0, 3.0)), "ignore") == [[], [], []]


@pytest.mark.parametrize("choice", ["warn", "error", "ignore"])
def test_a_save_warns_or_fails_as_the_setting_says(
    choice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, settings = tmp_path / "c", Settings(dcp_metadata="never", replicas=choice)  # type: ignore[arg-type]
    ranks = []
    for rank in range(2):
        held = shards(0, 12, replica=(rank, 2))
        held[0].flat.fill_(float(rank))
        ranks.append(saves.prepared(held))
    with caplog.at_level(logging.WARNING):
        if choice == "error":
            with pytest.raises(ReplicaMismatchError, match=r"model\.weight: rank"):
                saves.save(target, ranks, settings)
            assert saves.nothing_was_left(target)
            return
        saves.save(target, ranks, settings)
    assert ("model.weight: rank" in caplog.text) is (choice == "warn")
    source = open_checkpoint(target)
    chunk = source.chunks(["model.weight"])["model.weight"][0]
    assert torch.equal(source.read(chunk), torch.full((4, 3), float(owner("weight", 2))))

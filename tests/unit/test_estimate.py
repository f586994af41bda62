# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The arithmetic of an estimate, and its command's answers to what cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.io.host_bytes import host_pieces
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.plan import records
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.tools.estimate.costs import Bandwidths, files_of, groups_of
from mbridge_fsdp_ckpt.tools.estimate.counted import Tally, record_lengths
from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate
from mbridge_fsdp_ckpt.tools.estimate.job import chosen_kept, chosen_layout, sizes_of
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout
from testing.small_job import in_small, other_than
from tests.unit.test_cli import call


def test_ranks_of_a_stage_are_laid_out_as_megatron_numbers_them() -> None:
    layout = JobLayout(16, tensor=2, pipeline=2, expert=2)
    assert layout.mesh(expert=False, stage=1).tolist() == [[[8, 9], [10, 11], [12, 13], [14, 15]]]
    assert layout.mesh(expert=True, stage=1).tolist() == [
        [[[8], [9]], [[10], [11]], [[12], [13]], [[14], [15]]],
    ]


@pytest.mark.parametrize(("outer", "expected"), [("no_shard", [0, 1, 0, 1]), ("optim", [0, 2, 1, 3])])
def test_hybrid_sharding_numbers_inner_ranks_first(outer: Any, expected: list[int]) -> None:
    layout = JobLayout(4, instances=2, outer=outer)
    assert [layout.shard_rank(o, s) for o in range(2) for s in range(2)] == expected


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"world": 0}, "1 to 16,384 ranks"),
        ({"world": 16_385}, "1 to 16,384 ranks"),
        ({"world": 6, "tensor": 4}, "--tp 4 --pp 1 --cp 1 divides"),
        ({"world": 8, "pipeline": 3}, "--pp 3"),
        ({"world": 8, "expert": 3}, "--ep 3 --etp 1"),
        ({"world": 8, "expert": 4, "expert_tensor": 4}, "--ep 4 --etp 4"),
        ({"world": 8, "tensor": 4, "instances": 4}, "--outer 4 to divide the data-parallel size"),
        ({"world": 8, "expert": 4, "instances": 4}, "the expert data-parallel size"),
        ({"world": 8, "instances": 2, "outer": "optim", "strategy": "optim"}, "optim_grads_params"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says.replace("-", r"\-")):
        JobLayout(**sizes)


def test_a_layout_in_small_keeps_what_a_few_ranks_can_show() -> None:
    large = JobLayout(8960, tensor=2, expert=64)
    assert in_small(large, 4) == JobLayout(4, tensor=2, expert=2)
    assert other_than(in_small(large, 4)) == JobLayout(4, expert=2)
    assert in_small(JobLayout(64, context=4, instances=2, strategy="optim"), 2) == JobLayout(
        2, context=2, instances=2, strategy="optim"
    )
    assert other_than(JobLayout(3)) == JobLayout(1)


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "tp=two", "size=4", "tp=2;ep=4"])
def test_another_layout_is_given_by_sizes(text: str) -> None:
    assert sizes_of("world=16, ep=4") == {"world": 16, "expert": 4}
    with pytest.raises(ConfigurationError, match="--to with sizes"):
        sizes_of(text)


def test_what_was_not_chosen_is_left_to_the_configuration() -> None:
    assert chosen_layout({"world": 8, "tp": 2, "ep": None}, "optim", None) == {
        "world": 8,
        "tensor": 2,
        "outer": "optim",
    }
    assert chosen_kept(None, None, None, None) == {}
    assert chosen_kept("torch", "float32", "bfloat16", 0.0) == {
        "optimizer": "torch", "main": torch.float32, "moments": (torch.bfloat16,) * 2, "offload": 0.0,
    }  # fmt: skip
    assert chosen_kept(None, "bfloat16", None, None) == {"main": None}, "the model's own weights are trained"


SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (300,),
    (70_000,),
    (3, 5),
    (255, 256),
    (256, 257),
    (2, 70_000),
    (2, 3, 5),
    (1, 1, 300, 4),
]


@pytest.mark.parametrize("largest", [None, 1000])
def test_records_are_as_long_as_they_are_written(
    largest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LARGEST_RECORD", largest or records.LARGEST_RECORD)
    payload = PayloadWriter(as_path(tmp_path / "payload"))
    for size in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            elements, before = torch.zeros(size, dtype=dtype), payload.position
            chunks = payload.add_block("key", dtype, host_pieces(elements), whole(size))
            lengths = record_lengths(size, dtype)
            assert lengths == [chunk.record.length for chunk in chunks], size
            assert sum(lengths) == payload.position - before, size
    payload.close()


def test_seconds_are_the_slowest_hosts_or_the_storages() -> None:
    by_rank = np.array([4, 2, 1, 1, 3], dtype=np.int64) * 10**9  # hosts of two: 6, 2, 3
    slow_host = Bandwidths(host_write=2.0, host_read=3.0, storage_write=100.0, storage_read=100.0, ranks=2)
    assert slow_host.write_seconds(by_rank) == pytest.approx(3.0)
    assert slow_host.read_seconds(by_rank) == pytest.approx(2.0)
    slow_storage = Bandwidths(host_write=2.0, host_read=3.0, storage_write=1.0, storage_read=0.5, ranks=2)
    assert slow_storage.write_seconds(by_rank) == pytest.approx(11.0)
    assert slow_storage.read_seconds(by_rank) == pytest.approx(22.0)


def test_a_rank_that_writes_nothing_has_no_payload() -> None:
    tally = Tally(3)
    tally.bytes[:] = [5, 0, 7]
    assert files_of(tally) == 2 + 3 + 1 + 1 + 2
    tally.chunks[0] = 64_001
    assert files_of(tally) == 2 + 3 + 1 + 1


@pytest.mark.parametrize(("world", "expected"), [(1, 1), (2, 1), (33, 1), (34, 2), (1025, 32), (1026, 33), (8960, 33)])
def test_a_group_of_ranks_has_an_index_file(world: int, expected: int) -> None:
    assert groups_of(world) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["qwen3_8b_pretrain", "--world", "8"], "or MODULE:FUNCTION"),
        (["recipes.gone:qwen", "--world", "8"], "No module named 'recipes.gone'"),
        (["recipes.qwen:gone", "--world", "8"], "has no attribute 'gone'"),
        (["{folder}/config.json", "--world", "8"], "no such file"),
        (["{folder}", "--world", "8"], "no such file"),
        (["{folder}"], "Give --world"),
        (["{folder}/config.json", "--world", "8", "--tp", "3"], "--tp 3"),
        (["{folder}/config.json", "--world", "20000"], "16,384"),
        (["{folder}", "--world", "8", "--picture", "ranks.pdf"], "FILE.png"),
        (["{folder}", "--world", "8", "--to", "pp"], "--to with sizes"),
    ],
)
def test_what_cannot_be_estimated_is_said_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    found = call("estimate", *(argument.format(folder=tmp_path) for argument in arguments))
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith("ConfigurationError: ")
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1


def _found() -> Estimate:
    tally = Tally(3_000)
    tally.bytes[:] = 10**6
    tally.bytes[7] = 3 * 10**6
    tally.by_part["$experts"] = tally.bytes.copy()
    return Estimate("a_$model", JobLayout(3_000, tensor=2), tally, (), {}, 1.0)


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_shows_the_heaviest_of_many_ranks(kind: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    from mbridge_fsdp_ckpt.tools.estimate.picture import draw

    found = _found()
    assert draw(found, kind).startswith(begins)
    assert found.balance.ratio == pytest.approx(3.0, rel=1e-2)

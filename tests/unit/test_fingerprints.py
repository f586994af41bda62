# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about their plans, and how contradictions are found and named."""

import json
from collections.abc import Sequence

import pytest

from mbridge_fsdp_ckpt.coverage import buckets, plans
from mbridge_fsdp_ckpt.coverage.plans import Block, BlockRow, DisputedPlans
from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.plan.boxes import Shape
from mbridge_fsdp_ckpt.plan.slices import owner
from tests.unit.rounds import met
from tests.unit.shards import scalar, shards


def sums(ranks: Sequence[Sequence[LocalShard]]) -> list[int]:
    return buckets.added(json.loads(json.dumps([plans.fingerprint(map(Block.of, rank)) for rank in ranks])))


def bad(ranks: Sequence[Sequence[LocalShard]]) -> list[int]:
    """The buckets that are not zero."""
    return [bucket for bucket, total in enumerate(sums(ranks)) if total]


def decide(ranks: Sequence[Sequence[LocalShard]]) -> None:
    """Both meetings about a plan."""
    total = sums(ranks)
    if any(total):
        met([DisputedPlans(n, list(map(Block.of, rank)), total, lambda: None) for n, rank in enumerate(ranks)])


def named(ranks: Sequence[Sequence[LocalShard]]) -> str:
    with pytest.raises(PlanDisagreementError) as caught:
        decide(ranks)
    return caught.value.found


BUCKET = buckets.bucket_of("model.weight")


def test_buckets_come_from_a_checksum_that_every_process_computes_alike() -> None:
    assert buckets.bucket_of("123456789") == 0xCBF43926 % 256 == 38


def test_words_of_keys_differ_and_repeat() -> None:
    words = {buckets.key_word(f"model.layers.{n}.weight") for n in range(100)}
    assert len(words) == 100
    assert buckets.key_word("a") == buckets.key_word("a") < 1 << 64


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([shards(0, 12)], id="one rank has all"),
        pytest.param([shards(0, 6), shards(6, 12)], id="whole rows"),
        pytest.param([shards(0, 4), shards(4, 11), shards(11, 12)], id="cuts inside rows"),
        pytest.param([shards(0, 0), shards(0, 12), []], id="ranks with nothing"),
        pytest.param([shards(0, 7, gated=True), shards(7, 12, gated=True)], id="two components"),
        pytest.param([shards(0, 12, replica=(r, 3)) for r in range(3)], id="replicas tile each for itself"),
        pytest.param([[*shards(0, 6), scalar()], shards(6, 12)], id="a scalar beside them"),
        pytest.param([shards(0, 12) + shards(0, 6, key="b"), shards(6, 12, key="b")], id="several keys"),
        pytest.param([[], []], id="nobody holds anything"),
    ],
)
def test_plans_that_tile_leave_no_bucket(ranks: list[list[LocalShard]]) -> None:
    assert bad(ranks) == []
    decide(ranks)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([shards(0, 6), shards(9, 12)], id="a hole"),
        pytest.param([shards(3, 12)], id="nobody has the first row"),
        pytest.param([shards(0, 9)], id="nobody has the last row"),
        pytest.param([shards(0, 9), shards(6, 12)], id="an overlap"),
        pytest.param([shards(0, 12), shards(6, 12)], id="the last rows twice"),
        pytest.param([shards(0, 3), shards(3, 6), shards(3, 6), shards(9, 12)], id="hole and overlap alike"),
        pytest.param([shards(0, 6), shards(6, 12, dtype="bfloat16")], id="two dtypes"),
        pytest.param([shards(0, 6), shards(6, 12, shape=(5, 3))], id="two shapes"),
        pytest.param([shards(0, 6, shape=(4, 3)), shards(6, 12, shape=(3, 4))], id="swapped dimensions"),
        pytest.param([shards(0, 12, replica=(0, 2)), shards(0, 6, replica=(1, 2))], id="an incomplete replica"),
    ],
)
def test_plans_that_do_not_tile_leave_the_bucket_of_their_key(ranks: list[list[LocalShard]]) -> None:
    assert bad(ranks) == [BUCKET]
    named(ranks)


def test_a_bad_component_is_told_from_a_good_one() -> None:
    ranks = [shards(0, 6, gated=True), shards(9, 12, gated=True)]
    assert bad(ranks) == [buckets.bucket_of("model.weight_v")]


def test_blocks_are_those_in_the_wanted_buckets() -> None:
    mine = shards(2, 8) + shards(0, 12, key="other") + [scalar("model.weight")]
    assert buckets.bucket_of("model.other") != BUCKET
    weight = "model.weight", "float32", "sharded", [4, 3]
    alone = [int(bucket == BUCKET) for bucket in range(buckets.BUCKETS)]
    [(rank, rows)] = DisputedPlans(7, map(Block.of, mine), alone, lambda: None).message()["by_rank"]
    assert rank == 7
    assert rows == [
        (*weight, [0, 2], [1, 1], 0, 1, False, True),
        (*weight, [1, 0], [1, 3], 0, 1, False, True),
        (*weight, [2, 0], [1, 2], 0, 1, False, True),
        ("model.weight", "float32", "tensor", [], [], [], 0, 1, False, True),
    ]


def test_a_rank_names_a_bounded_number_of_blocks_the_replicated_first() -> None:
    many = [block for n in range(1000) for block in map(Block.of, shards(0, 12, key=f"weight{n:04d}"))]
    many += map(Block.of, shards(0, 12, replica=(1, 2)))
    named = DisputedPlans(0, many, [1] * buckets.BUCKETS, lambda: None).message()
    [(_, rows)] = named["by_rank"]
    assert len(rows) == 500
    assert [row[6:8] for row in rows[:2]] == [(1, 2), (0, 1)]
    assert named["beyond"] == (True, "model.weight0499")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([shards(0, 6), shards(9, 12)], ["model.weight", "no rank holds 3 of 12", "0, 1"]),
        ([shards(0, 6), [], shards(3, 12)], ["model.weight", "ranks 0 and 2", "same rows"]),
        ([shards(0, 3), shards(3, 6), shards(3, 6), shards(9, 12)], ["ranks 1 and 2", "same rows"]),
        (
            [shards(0, 6), shards(6, 12, dtype="bfloat16")],
            ["rank 0 says float32 [4, 3]", "rank 1 says bfloat16 [4, 3]"],
        ),
        (
            [shards(0, 3), shards(3, 6), shards(6, 12, shape=(3, 4))],
            ["rank 0, 1 says float32 [4, 3]", "rank 2 says float32 [3, 4]"],
        ),
        ([shards(0, 12, replica=(0, 2)), shards(0, 6, replica=(1, 2))], ["no rank holds 6 of 12", "rank 1 hold"]),
    ],
)
def test_the_error_names_key_and_ranks(ranks: list[list[LocalShard]], words: list[str]) -> None:
    found = named(ranks)
    assert [word for word in words if word not in found] == []


def row(key: str, offset: list[int], size: list[int], shape: Sequence[int] = (4,)) -> BlockRow:
    return key, "float32", "sharded", list(shape), offset, size, 0, 1, False, True


def decided(rows: list[list[BlockRow]], unnamed: int = 0) -> str:
    """What is found in blocks that the ranks named, where others that add up to `unnamed` were not."""
    blocks = [[Block.from_wire(row) for row in rank] for rank in rows]
    total = buckets.added(map(plans.fingerprint, blocks))
    assert any(total) or unnamed
    total[BUCKET] += unnamed
    with pytest.raises(PlanDisagreementError) as caught:
        DisputedPlans(0, [], total, lambda: None).decide({"by_rank": list(enumerate(rows)), "beyond": None})
    return caught.value.found


def test_good_keys_that_share_a_bucket_are_not_named() -> None:
    found = decided([[row("bad", [0], [1]), row("good", [0], [2])], [row("good", [2], [2])]])
    assert found.startswith("bad: no rank holds 3 of 4")
    assert "good" not in found


def test_many_bad_keys_are_counted_not_listed() -> None:
    found = decided([[row(f"key{n:02d}", [0], [1]) for n in range(25)]])
    assert "key09" in found
    assert "key10" not in found
    assert "15 more keys" in found


def test_a_contradiction_beyond_the_named_blocks_still_fails() -> None:
    assert "beyond" in decided([[row("key", [0], [4])]], unnamed=1)


WRITER = owner("weight", 2)


def test_a_tensor_whose_writer_is_missing_is_refused() -> None:
    """All that exists tiles, and nobody writes."""
    found = named([shards(0, 12, replica=(1 - WRITER, 2)), shards(0, 12, key="other")])
    assert found == (
        "model.weight: no rank writes it: rank 0 hold it, but not the one of the 2 replicas that has to write it"
    )


def test_a_tensor_that_only_its_writer_holds_is_in_order() -> None:
    ranks = [shards(0, 12, replica=(WRITER, 2)), shards(0, 12, key="other")]
    assert bad(ranks) == [BUCKET]
    decide(ranks)


def test_a_scalar_whose_writer_is_missing_is_refused() -> None:
    assert "no rank writes it" in named([[scalar(replica=(1 - owner("step", 2), 2))]])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_a_tensor_without_elements_is_written_once(shape: Shape) -> None:
    assert bad([shards(0, 0, shape=shape, replica=(r, 3)) for r in range(3)]) == []
    writer = owner("weight", 3)
    lost = [shards(0, 0, shape=shape, replica=(r, 3)) for r in range(3) if r != writer]
    assert "no rank writes it" in named(lost)


def test_an_empty_block_beside_the_origin_says_its_shape_all_the_same() -> None:
    """Nothing of it is tiled: only that it is there can contradict."""
    rows = [[row("key", [0, 0], [3, 0], shape=[3, 0])], [(*row("key", [1, 0], [3, 0], shape=[4, 0])[:-2], True, False)]]
    assert "rank 0 says float32 [3, 0], rank 1 says float32 [4, 0]" in decided(rows)


def test_ranks_that_count_replicas_otherwise_are_named() -> None:
    ranks = [shards(0, 12, replica=(0, 2)), shards(0, 12, replica=(1, 3))]
    assert "rank 0 says 2 ranks hold each block, rank 1 says 3" in named(ranks)


def test_a_later_stages_copies_are_in_order_where_the_first_stage_writes() -> None:
    copies = [shards(0, 12, is_copy=True), shards(0, 6, is_copy=True), shards(6, 12, is_copy=True)]
    decide([shards(0, 12), *copies])
    assert "no rank writes it: rank 0, 1, 2 hold it" in named(copies)


def test_two_that_do_not_know_of_each_other_leave_nothing_in_the_fingerprint() -> None:
    """See test_group_index.py: their first elements are counted when the index is merged."""
    assert bad([shards(0, 12), shards(0, 12)]) == []

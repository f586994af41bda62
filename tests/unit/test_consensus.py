"""What ranks tell each other about their plans, and how contradictions are found and named."""

import json
from collections.abc import Sequence

import pytest

from mbridge_fsdp_ckpt import consensus
from mbridge_fsdp_ckpt.inventory import Holding
from tests.unit.holdings import holdings, scalar


def judge(ranks: Sequence[Sequence[Holding]]) -> list[int]:
    return consensus.add(json.loads(json.dumps([consensus.sketch(rank) for rank in ranks])))


def named(ranks: Sequence[Sequence[Holding]]) -> str:
    bad = judge(ranks)
    assert bad
    blocks = json.loads(json.dumps([consensus.blocks_in(rank, bad) for rank in ranks]))
    return consensus.disagreement(blocks).found


BUCKET = consensus.bucket_of("model.weight")


def test_buckets_come_from_a_checksum_that_every_process_computes_alike() -> None:
    assert consensus.bucket_of("123456789") == 0xCBF43926 % 256 == 38


def test_words_of_keys_differ_and_repeat() -> None:
    words = {consensus.key_word(f"model.layers.{n}.weight") for n in range(100)}
    assert len(words) == 100
    assert consensus.key_word("a") == consensus.key_word("a") < 1 << 64


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([holdings(0, 12)], id="one rank has all"),
        pytest.param([holdings(0, 6), holdings(6, 12)], id="whole rows"),
        pytest.param([holdings(0, 4), holdings(4, 11), holdings(11, 12)], id="cuts inside rows"),
        pytest.param([holdings(0, 0), holdings(0, 12), []], id="ranks with nothing"),
        pytest.param([holdings(0, 7, gated=True), holdings(7, 12, gated=True)], id="two components"),
        pytest.param([holdings(0, 12, replica=(r, 3)) for r in range(3)], id="replicas tile each for itself"),
        pytest.param([[*holdings(0, 6), scalar()], holdings(6, 12)], id="a scalar beside them"),
        pytest.param([holdings(0, 12) + holdings(0, 6, key="b"), holdings(6, 12, key="b")], id="several keys"),
        pytest.param([[], []], id="nobody holds anything"),
    ],
)
def test_plans_that_tile_leave_no_bucket(ranks: list[list[Holding]]) -> None:
    assert judge(ranks) == []


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([holdings(0, 6), holdings(9, 12)], id="a hole"),
        pytest.param([holdings(3, 12)], id="nobody has the first row"),
        pytest.param([holdings(0, 9)], id="nobody has the last row"),
        pytest.param([holdings(0, 9), holdings(6, 12)], id="an overlap"),
        pytest.param([holdings(0, 12), holdings(6, 12)], id="the last rows twice"),
        pytest.param([holdings(0, 3), holdings(3, 6), holdings(3, 6), holdings(9, 12)], id="hole and overlap alike"),
        pytest.param([holdings(0, 6), holdings(6, 12, dtype="bfloat16")], id="two dtypes"),
        pytest.param([holdings(0, 6), holdings(6, 12, shape=(5, 3))], id="two shapes"),
        pytest.param([holdings(0, 6, shape=(4, 3)), holdings(6, 12, shape=(3, 4))], id="swapped dimensions"),
        pytest.param([holdings(0, 12, replica=(0, 2)), holdings(0, 6, replica=(1, 2))], id="an incomplete replica"),
    ],
)
def test_plans_that_do_not_tile_leave_the_bucket_of_their_key(ranks: list[list[Holding]]) -> None:
    assert judge(ranks) == [BUCKET]


def test_a_bad_component_is_told_from_a_good_one() -> None:
    ranks = [holdings(0, 6, gated=True), holdings(9, 12, gated=True)]
    assert judge(ranks) == [consensus.bucket_of("model.weight_v")]


def test_blocks_are_those_in_the_wanted_buckets() -> None:
    mine = holdings(2, 8) + holdings(0, 12, key="other") + [scalar("model.weight")]
    assert consensus.bucket_of("model.other") != BUCKET
    assert consensus.blocks_in(mine, [BUCKET]) == [
        ["model.weight", "float32 [4, 3]", "0 of 1", [0, 2], [1, 1]],
        ["model.weight", "float32 [4, 3]", "0 of 1", [1, 0], [1, 3]],
        ["model.weight", "float32 [4, 3]", "0 of 1", [2, 0], [1, 2]],
    ]


def test_a_rank_names_a_bounded_number_of_blocks() -> None:
    many = holdings(0, 12) * 1000
    assert len(consensus.blocks_in(many, [BUCKET])) == 500


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([holdings(0, 6), holdings(9, 12)], ["model.weight", "no rank holds 3 of 12", "0, 1"]),
        ([holdings(0, 6), [], holdings(3, 12)], ["model.weight", "ranks 0 and 2", "same rows"]),
        ([holdings(0, 3), holdings(3, 6), holdings(3, 6), holdings(9, 12)], ["ranks 1 and 2", "same rows"]),
        (
            [holdings(0, 6), holdings(6, 12, dtype="bfloat16")],
            ["rank 0 says float32 [4, 3]", "rank 1 says bfloat16 [4, 3]"],
        ),
        (
            [holdings(0, 3), holdings(3, 6), holdings(6, 12, shape=(3, 4))],
            ["rank 0, 1 says float32 [4, 3]", "rank 2 says float32 [3, 4]"],
        ),
        ([holdings(0, 12, replica=(0, 2)), holdings(0, 6, replica=(1, 2))], ["no rank holds 6 of 12", "rank 1 hold"]),
    ],
)
def test_the_error_names_key_and_ranks(ranks: list[list[Holding]], words: list[str]) -> None:
    found = named(ranks)
    assert [word for word in words if word not in found] == []


def test_good_keys_that_share_a_bucket_are_not_named() -> None:
    found = consensus.disagreement(
        [
            [["bad", "float32 [4]", "0 of 1", [0], [1]], ["good", "float32 [4]", "0 of 1", [0], [2]]],
            [["good", "float32 [4]", "0 of 1", [2], [2]]],
        ]
    ).found
    assert found.startswith("bad: no rank holds 3 of 4")
    assert "good" not in found


def test_many_bad_keys_are_counted_not_listed() -> None:
    blocks = [[f"key{n:02d}", "float32 [4]", "0 of 1", [0], [1]] for n in range(25)]
    found = consensus.disagreement([blocks]).found
    assert "key09" in found
    assert "key10" not in found
    assert "15 more keys" in found


def test_a_contradiction_beyond_the_named_blocks_still_fails() -> None:
    good = [["key", "float32 [4]", "0 of 1", [0], [4]]]
    assert "beyond" in consensus.disagreement([good]).found

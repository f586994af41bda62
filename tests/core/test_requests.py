"""A whole save makes as many requests a rank to the rendezvous store, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.core import requests


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_save_makes_a_constant_number_of_requests(ranks: int, megatron_ranks: RankPool, tmp_path: Path) -> None:
    for rank, (first, second) in enumerate(megatron_ranks.run(requests.of_two_saves, str(tmp_path / "c"), ranks=ranks)):
        first, second = (_of_each(one) for one in (first, second))
        assert first.pop(f"set {rank}") == second.pop(f"set {rank}", 0) + 1, "its host, once a process"
        if rank:
            assert (
                first
                == second
                == {
                    "add agreements": 1,
                    "compare_set purpose": 1,
                    "wait verdict": 2,
                    "get verdict": 2,
                    "add read": 1,
                }
            )


def test_the_call_of_a_save_beside_the_training_waits_for_no_store(megatron_ranks: RankPool) -> None:
    """The store would answer all ranks of the job, one after the other, while they all wait to train on."""
    found = megatron_ranks.run(requests.of_calls, ranks=2)
    assert [asked for asked, _ in found] == [0, 0]
    assert found[0][1] == found[1][1], "in the order of the calls, whoever is asked first"
    assert len(set(found[0][1])) == 2


@pytest.mark.parametrize(("error", "said"), [(dist.DistStoreError("no answer"), "c.1"), (ValueError("odd"), "odd")])
def test_a_save_beside_the_training_that_the_store_does_not_answer_fails_by_name(
    error: Exception, said: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    found = megatron_ranks.run(requests.without_an_answer, str(tmp_path / "c"), error, ranks=2)
    for rank, (refused, later) in enumerate(found):
        assert said in refused
        assert f"rank {rank}" in refused
        assert later


def _of_each(requests: dict[str, int]) -> dict[str, int]:
    """Without signs of life, which are a matter of time, and what the last one to read does."""
    return {what: n for what, n in requests.items() if what not in ("add beats", "set left")}

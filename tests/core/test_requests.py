# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A whole save makes as many requests a rank to the rendezvous store, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from testing.ranks import RankPool
from tests.core import requests


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_save_makes_a_constant_number_of_requests(ranks: int, megatron_ranks: RankPool, tmp_path: Path) -> None:
    for rank, saves in enumerate(megatron_ranks.run(requests.of_saves, str(tmp_path / "c"), 4, ranks=ranks)):
        first, *others = (_of_each(one) for one in saves)
        assert first.pop(f"set {rank}") == others[0].pop(f"set {rank}", 0) + 1, "its host, once a process"
        if rank:
            meetings = {"set " + str(rank): 2, "wait decision": 2, "get decision": 2, "add read": 1}
            assert others[-1] == {"wait open": 1, "get now": 1} | meetings
        else:
            *_, one, other = ({what: n for what, n in asked.items() if "delete_key" in what} for asked in others)
            assert one == other, "what is deleted of an earlier save is as much each time"
            assert 0 < sum(one.values()) < 16 + 2 * ranks


def test_the_call_of_an_asynchronous_save_waits_for_no_store(megatron_ranks: RankPool) -> None:
    """The store would answer all ranks of the job, one after the other, while they all wait to train on."""
    found = megatron_ranks.run(requests.of_calls, ranks=2)
    assert [asked for asked, _ in found] == [0, 0]
    assert found[0][1] == found[1][1]
    assert len(set(found[0][1])) == 2


@pytest.mark.parametrize(("error", "said"), [(dist.DistStoreError("no answer"), "c.1"), (ValueError("odd"), "odd")])
def test_an_asynchronous_save_that_the_store_does_not_answer_fails_by_name(
    error: Exception, said: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    found = megatron_ranks.run(requests.without_an_answer, str(tmp_path / "c"), error, ranks=2)
    for rank, (refused, later) in enumerate(found):
        assert said in refused
        assert f"rank {rank}" in refused
        assert later


def _of_each(requests: dict[str, int]) -> dict[str, int]:
    """Without heartbeats, which are a matter of time, and what the last one to read does."""
    return {what: n for what, n in requests.items() if what not in ("add beats", "set left")}

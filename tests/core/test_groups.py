# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Connections of ranks that read for each other: who loses a peer can leave, and joining costs the store little."""

from __future__ import annotations

from testing.ranks import RankPool
from tests.core import groups

WORLD = 4


def test_who_lost_a_peer_can_leave_although_others_still_send_to_it(rank_pool: RankPool) -> None:
    """A lazy group of gloo's never closed then: the load hung on the rank that lost its peer."""
    results = rank_pool.run(groups.whose_operation_broke, ranks=WORLD, time_limit=40.0)
    for rank in (0, 2, 3):
        assert "ranks 0, 1, 2, 3 to read for each other" in results[rank]["found"]
    assert results[0]["seconds"] < groups.ENDS_S / 2


def test_joining_takes_the_same_few_requests_in_a_circle_of_any_size(rank_pool: RankPool) -> None:
    of_two, of_four = (rank_pool.run(groups.requests_of_joining, ranks=size) for size in (2, WORLD))
    assert set(of_two) == set(of_four)
    assert max(of_four) <= 4


def test_each_of_several_interfaces_is_connected(rank_pool: RankPool) -> None:
    of_one, of_two = (rank_pool.run(groups.requests_of_joining, names, ranks=2) for names in ("lo", "lo,lo"))
    assert of_two == [2 * requests for requests in of_one]

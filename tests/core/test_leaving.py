# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks that begin different things fail at once, by name; what all agreed on holds where rank 0 leaves right after."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import Died, RankPool
from testing.templates import Templates
from tests.core import leaving
from tests.patience import patient_ranks


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, ranks=2)


@pytest.mark.parametrize("what", ["save", "load", "failed save"])
def test_rank_0_may_leave_right_after_its_last_word(what: leaving.What, pool: RankPool, tmp_path: Path) -> None:
    """It serves the store: once it has gone, nobody can read what it said."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = tmp_path / "iter_0000001"
    gone, (seen, after) = pool.run(leaving.last_word, str(target), what, port, ranks=2, may_die={0})
    assert isinstance(gone, Died)
    assert after.startswith("RankMissingError: [rank 1] expected the job's rendezvous store to answer at 'save to")
    if what == "failed save":
        assert seen.startswith("UnsupportedStateError: [values.bad]")
        assert not target.exists()
    else:
        assert seen == "done"
        assert (target / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("others", "named"),
    [(("load", "b"), "load from"), (("save", "b"), "save to")],
)
def test_ranks_that_begin_different_things_are_named_at_once(
    others: tuple[str, str], named: str, pool: RankPool, tmp_path: Path
) -> None:
    call, name = others
    calls = {0: ("save", str(tmp_path / "a")), 1: (call, str(tmp_path / name))}
    results = pool.run(leaving.begin, calls, time_limit=60.0)  # half of the limit of a wait
    error, common = results[0]
    assert results == [[error, common]] * 2, "the same on all ranks"
    assert error.startswith("ConfigurationError: expected all ranks to begin the same save or load; found on rank 0: ")
    assert f"on rank 0: save to {tmp_path / 'a'}, on rank 1: {named} {tmp_path / name}." in error
    assert common == "done"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.common"], "a wrong call changes nothing"

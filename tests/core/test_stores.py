# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Jobs that share a store do not meet each other; a store that cannot keep what meetings promise is refused by name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.core import stores
from tests.patience import patient_ranks
from tests.unit.test_connection import serving


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, ranks=4)


def test_jobs_that_prefixes_keep_apart_in_one_store_save_at_the_same_time(pool: RankPool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert pool.run(stores.two_jobs, str(tmp_path), port, ranks=4) == [[True] * 3] * 4


def test_a_store_of_files_is_refused_before_anything_is_written(pool: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "iter_0000001"
    for said in pool.run(stores.refused, str(target), "FileStore", ranks=2):
        assert len(said) == 3
        for one in said:
            assert one.startswith("ConfigurationError: expected a job of several ranks that met in a TCPStore"), one
            assert "found FileStore" in one
    assert not target.exists()


def test_a_frozen_store_ends_calls_by_name_and_the_next_ones_meet(pool: RankPool, tmp_path: Path) -> None:
    with serving() as (host, port):
        for said in pool.run(stores.frozen_host, str(tmp_path), port, host.pid, ranks=2):
            assert len(said) == 6
            for one in said[:3]:
                assert one.startswith("RankMissingError"), one
                assert "the job's rendezvous store to answer" in one
                assert "is stopped or out of reach" in one
            assert said[3:] == ["done"] * 3

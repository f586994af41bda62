# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Errors carry their fields, and cross ranks and processes without losing them."""

import json
import pickle
import socket

import pytest

from mbridge_fsdp_ckpt import errors
from mbridge_fsdp_ckpt.errors import CheckpointError, RankFailedError, StorageError, describe_unexpected

NAMED = sorted(
    (
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, CheckpointError) and c is not CheckpointError
    ),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize(
    ("rank", "key", "message"),
    [
        (None, None, "expected two rows; found one. Add a row."),
        (3, None, "[rank 3] expected two rows; found one. Add a row."),
        (0, None, "[rank 0] expected two rows; found one. Add a row."),
        (None, "weight", "[weight] expected two rows; found one. Add a row."),
        (3, "weight", "[rank 3, weight] expected two rows; found one. Add a row."),
    ],
)
def test_the_message_says_where_what_and_what_to_do(rank: int | None, key: str | None, message: str) -> None:
    error = CheckpointError(expected="two rows", found="one", remedy="Add a row.", rank=rank, key=key)
    assert str(error) == message


@pytest.mark.parametrize("kind", NAMED)
def test_an_error_crosses_ranks_and_processes(kind: type[CheckpointError]) -> None:
    error = kind(expected="é", found='"b"', remedy="c", rank=5, key="k")
    copies = CheckpointError.from_wire(json.loads(json.dumps(error.to_wire()))), pickle.loads(pickle.dumps(error))
    for copy in copies:
        assert type(copy) is kind
        assert str(copy) == str(error)
        assert (copy.expected, copy.found, copy.remedy, copy.rank, copy.key) == ("é", '"b"', "c", 5, "k")


def test_every_named_error_says_in_its_docstring_when_it_is_raised() -> None:
    assert len(NAMED) > 10
    assert all(cls.__doc__ for cls in NAMED)


def test_an_error_that_this_release_does_not_know_keeps_its_words() -> None:
    wire = CheckpointError(expected="a", found="b", remedy="c", rank=1).to_wire() | {"error": "FutureError"}
    error = CheckpointError.from_wire(wire)
    assert type(error) is RankFailedError
    assert str(error) == "[rank 1] expected a; found b. c"


def test_what_crosses_ranks_is_bounded() -> None:
    error = CheckpointError(expected="e" * 100_000, found="f" * 100_000, remedy="r" * 100_000)
    assert len(json.dumps(error.to_wire())) < 50_000
    assert error.expected == "e" * 100_000


def test_a_rank_is_filled_in_once() -> None:
    error = StorageError(expected="a", found="b", remedy="c")
    assert error.rank is None
    first = error.at_rank(2)
    assert (type(first), first.rank, str(first)) == (
        StorageError,
        2,
        f"[rank 2 on {socket.gethostname()}] expected a; found b. c",
    )
    assert first.at_rank(7) is first
    assert error.at_rank(0).at_rank(7).rank == 0


@pytest.mark.parametrize(
    ("raised", "kind", "found"),
    [
        (ValueError("odd"), RankFailedError, "ValueError: odd"),
        (PermissionError(13, "Permission denied"), StorageError, "PermissionError: [Errno 13] Permission denied"),
        (MemoryError(), RankFailedError, "MemoryError: "),
    ],
)
def test_a_foreign_exception_gets_a_name(raised: Exception, kind: type[CheckpointError], found: str) -> None:
    error = describe_unexpected(raised, rank=4, doing="writing chunks")
    assert type(error) is kind
    assert (error.rank, error.found, error.expected) == (4, found, "writing chunks to succeed")


def test_a_named_error_keeps_its_name() -> None:
    mine = errors.FamilyError(expected="a", found="b", remedy="c")
    assert describe_unexpected(mine, rank=None, doing="planning") is mine
    there = describe_unexpected(mine, rank=4, doing="planning")
    assert (type(there), there.rank) == (errors.FamilyError, 4)

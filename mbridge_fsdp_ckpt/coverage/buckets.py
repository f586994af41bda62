# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How ranks compare what they have, bounded, however many there are: sums first, then rows.

Each rank adds up the shares of what it has in a fixed number of buckets, by key.  Shares are made so that each bucket
is zero over all ranks if these fit together.  Otherwise the ranks meet again (`RowRound`): they name what they have in
the bad buckets as rows, and rank 0 compares these one by one.

Rows have an order, and where there are too many all from some place on are left out, on all ranks alike: of each key
that is named, every rank's rows are there, or none.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypedDict

from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.plan.tiling import PRIME

BUCKETS = 256
OF_ONE_RANK, IN_ALL = 500, 20_000
"""Rows that are named."""

type Place = tuple[bool, str]
"""Where a row stands: what comes first, and its key."""


class _Compared(Protocol):
    """What ranks compare: its share, modulo `PRIME`, is added to the bucket of its key, its row is named by place."""

    @property
    def key(self) -> str: ...
    @property
    def share(self) -> int: ...
    @property
    def place(self) -> Place: ...
    def to_wire(self) -> Any: ...


def bucket_of(key: str) -> int:
    """The bucket a key falls into."""
    return zlib.crc32(key.encode()) % BUCKETS


def key_word(key: str) -> int:
    """A pseudo-random number for a key, modulo `PRIME`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % PRIME


def share_of_one(replica: Axis) -> int:
    """1/n, modulo `PRIME`, for one of n replicas: they add up to one."""
    return pow(replica.count, -1, PRIME)


def in_buckets(shares: Iterable[tuple[str, int]]) -> list[int]:
    """Shares added up by the buckets of their keys."""
    buckets = [0] * BUCKETS
    for key, share in shares:
        bucket = bucket_of(key)
        buckets[bucket] = (buckets[bucket] + share) % PRIME
    return buckets


def fingerprint(items: Iterable[_Compared]) -> list[int]:
    """What these add up to, by buckets."""
    return in_buckets((item.key, item.share) for item in items)


def added(fingerprints: Iterable[list[int]]) -> list[int]:
    """Fingerprints of several ranks, as one."""
    return [sum(column) % PRIME for column in zip(*fingerprints, strict=True)]


class Rows[R](TypedDict):
    """By rank; and the place from which on rows were left out, if they were."""

    by_rank: list[tuple[int, list[R]]]
    beyond: Place | None


@dataclass(slots=True)
class RowRound[N: _Compared, V](Round[Rows[Any], V]):
    """The meeting after sums that are not zero: ranks name what they have in the bad buckets.

    Args:
        rank: This rank.
        items: The items of this rank.
        sums: The sums of all ranks, by bucket.
        then: Makes the decision, on rank 0, where nothing contradicts.
    """

    rank: int
    items: Iterable[N]
    sums: list[int]
    then: Callable[[], V]
    kind: ClassVar[type[Any]]
    """The class of the items, whose `from_wire` reads a row."""

    def message(self) -> Rows[Any]:
        """This rank's rows in the bad buckets, up to a bound."""
        named = [(self.rank, item.to_wire()) for item in self.items if self.sums[bucket_of(item.key)]]
        return _bounded(named, None, self._place, OF_ONE_RANK)

    def combine(self, messages: list[Rows[Any]]) -> Rows[Any]:
        """Rows of several ranks, up to a bound."""
        rows = [(rank, row) for message in messages for rank, found in message["by_rank"] for row in found]
        ends = [(first, key) for message in messages for first, key in filter(None, [message["beyond"]])]
        return _bounded(rows, min(ends, default=None), self._place, IN_ALL)

    def decide(self, whole: Rows[Any]) -> V:
        """Whether what was named contradicts, and what follows if it does not."""
        held = [(rank, self.kind.from_wire(row)) for rank, found in whole["by_rank"] for row in found]
        self.check(held, all_named=fingerprint(item for _, item in held) == self.sums)
        return self.then()

    @abstractmethod
    def check(self, held: list[tuple[int, N]], *, all_named: bool) -> None:
        """Raise what the ranks contradict in what they hold; unless all is named, sums are not explained by it."""

    def _place(self, row: Any) -> Place:
        place: Place = self.kind.from_wire(row).place
        return place


def listed(texts: Sequence[str], most: int) -> str:
    """What is said of keys, for an error, up to a bound."""
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more keys" if len(texts) > most else "")


def ranks_listed(ranks: Iterable[int]) -> str:
    """Ranks for an error, up to a bound."""
    found = sorted(set(ranks))
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")


def _bounded[R](rows: Sequence[tuple[int, R]], beyond: Place | None, order: Callable[[R], Place], most: int) -> Rows[R]:
    placed = sorted(((order(row), rank, row) for rank, row in rows), key=lambda item: item[:2])
    if len(placed) > most:
        beyond = min(beyond or placed[most][0], placed[most][0])
    by_rank: dict[int, list[R]] = defaultdict(list)
    for place, rank, row in placed:
        if beyond is None or place < beyond:
            by_rank[rank].append(row)
    return {"by_rank": sorted(by_rank.items(), key=lambda item: item[0]), "beyond": beyond}

"""What ranks tell each other about their plans, bounded, and how rank 0 judges it.

Each rank adds up the tiling sketches of its blocks in a fixed number of buckets, by key.  If every bucket adds up to
zero over all ranks, the plans tile every tensor.  Otherwise the ranks name their blocks in the bad buckets, and the
error names keys and ranks.  The same buckets tell which keys of a checkpoint no rank asks for.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.geometry import PRIME, Box, Shape, TilingSketch
from mbridge_fsdp_ckpt.inventory import Holding

BUCKETS = 256
_BLOCKS_NAMED = 500  # a rank
_KEYS_NAMED = 10


def bucket_of(key: str) -> int:
    """The bucket a key falls into."""
    return zlib.crc32(key.encode()) % BUCKETS


def key_word(key: str) -> int:
    """A pseudo-random number for a key, modulo `PRIME`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % PRIME


def sketch(holdings: Iterable[Holding]) -> list[int]:
    """One rank's buckets.  Replicas are sketched apart, since each must tile the tensor by itself."""
    buckets = [0] * BUCKETS
    for holding in holdings:
        bucket = bucket_of(holding.key)
        buckets[bucket] = (buckets[bucket] + _share(holding)) % PRIME
    return buckets


def _share(holding: Holding) -> int:
    if holding.is_scalar:
        return 0
    identity = f"{holding.key}|{holding.entry.dtype}|{_replica(holding)}"
    return _share_of(identity, holding.entry.shape, holding.piece.box, holding.piece.is_origin)


def _replica(holding: Holding) -> str:
    replica = holding.piece.replica
    return f"{replica.index} of {replica.count}" + (" copy" if holding.plan.layout.is_copy else "")


@lru_cache(maxsize=1 << 16)
def _share_of(identity: str, shape: Shape, box: Box, is_origin: bool) -> int:
    """One block's share; kept, so that the next save of the same blocks computes nothing."""
    tiling = TilingSketch.of(identity, shape)
    share = tiling.of_box(box)
    return share - tiling.of_whole() if is_origin else share


def add(sketches: Iterable[list[int]]) -> list[int]:
    """Buckets of all ranks that do not add up to zero."""
    totals = [sum(column) % PRIME for column in zip(*sketches, strict=True)]
    return [bucket for bucket, total in enumerate(totals) if total]


def blocks_in(holdings: Iterable[Holding], buckets: Iterable[int]) -> list[list[Any]]:
    """This rank's blocks in the given buckets, as data, up to a bound."""
    wanted = set(buckets)
    blocks: list[list[Any]] = []
    for holding in holdings:
        if holding.is_scalar or bucket_of(holding.key) not in wanted:
            continue
        box = holding.piece.box
        description = f"{holding.entry.dtype} {list(holding.entry.shape)}"
        blocks.append([holding.key, description, _replica(holding), list(box.offset), list(box.size)])
        if len(blocks) == _BLOCKS_NAMED:
            break
    return blocks


def disagreement(blocks_by_rank: list[list[list[Any]]]) -> PlanDisagreementError:
    """Name the keys and ranks that contradict each other."""
    by_key: dict[tuple[str, str], list[tuple[int, str, Box]]] = defaultdict(list)
    for rank, blocks in enumerate(blocks_by_rank):
        for key, description, replica, offset, size in blocks:
            by_key[key, replica].append((rank, description, Box(tuple(offset), tuple(size))))
    contradictions = [text for (key, _), blocks in sorted(by_key.items()) if (text := _contradiction(key, blocks))]
    shown = "; ".join(contradictions[:_KEYS_NAMED]) or "blocks beyond the first that each rank named"
    more = f"; and {len(contradictions) - _KEYS_NAMED} more keys" if len(contradictions) > _KEYS_NAMED else ""
    return PlanDisagreementError(
        expected="plans that cover every tensor exactly once",
        found=shown + more,
        remedy="The ranks hold different models, or a parameter's metadata was changed on the ranks named. "
        "Nothing was written.",
    )


def _contradiction(key: str, blocks: list[tuple[int, str, Box]]) -> str | None:
    descriptions: dict[str, list[int]] = defaultdict(list)
    for rank, description, _ in blocks:
        if rank not in descriptions[description]:
            descriptions[description].append(rank)
    if len(descriptions) > 1:
        return f"{key}: " + ", ".join(f"rank {_ranks(ranks)} says {text}" for text, ranks in descriptions.items())
    overlaps = {
        (rank, other)
        for i, (rank, _, box) in enumerate(blocks)
        for other, _, second in blocks[i + 1 :]
        if box.intersect(second)
    }
    if overlaps:
        first, second = sorted(overlaps)[0]
        return f"{key}: ranks {first} and {second} hold the same rows"
    shape = [int(n) for n in next(iter(descriptions)).partition("[")[2].rstrip("]").split(",") if n.strip()]
    held = sum(box.volume for _, _, box in blocks)
    tiling = TilingSketch.of(key, tuple(shape))
    if sum(tiling.of_box(box) for _, _, box in blocks) % PRIME == tiling.of_whole() % PRIME:
        return None
    ranks = _ranks(sorted({rank for rank, _, _ in blocks}))
    return f"{key}: no rank holds {math.prod(shape) - held} of {math.prod(shape)} elements (rank {ranks} hold the rest)"


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

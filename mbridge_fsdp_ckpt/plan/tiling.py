# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A fingerprint that proves a tiling: integers again, added up in any order."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from mbridge_fsdp_ckpt.plan.boxes import Box, Shape, whole

PRIME = (1 << 61) - 1
"""Modulus of fingerprints."""
_SALT = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class TilingFingerprint:
    """A number that is zero, summed over all writers, if and (almost surely) only if the boxes tile the tensor.

    Element (i, j, ...) of a tensor has the weight r0**i * r1**j * ..., modulo a prime of 61 bits, with pseudo-random
    rd that come from the tensor's identity.  Sums over boxes have a closed form, so a writer's share costs nothing
    per element, and sums of different ranks may be added in any order.  A row that nobody or two ranks write, or two
    ranks that disagree on the identity (key, shape, dtype), leave a remainder.

    Tried before: volumes alone, where a hole and an overlap of one size cancel out; and weights that are quadratic in
    the index, where rows of equal sums and equal squares do.
    """

    roots: tuple[int, ...]
    shape: Shape

    @classmethod
    def of(cls, identity: str, shape: Shape) -> TilingFingerprint:
        """Fingerprint of a tensor that all ranks know by the same identity and shape."""
        return cls(tuple(_root(f"{identity}|{shape}|{dim}") for dim in range(max(1, len(shape)))), shape)

    def of_box(self, box: Box) -> int:
        """The box's share, modulo `PRIME`."""
        share = self.roots[0] if not self.shape else 1
        for root, low, size in zip(self.roots, box.offset, box.size, strict=False):
            share = share * _power_sum(root, low, size) % PRIME
        return share

    def of_whole(self) -> int:
        """What the shares of a complete tiling add up to, modulo `PRIME`."""
        return self.of_box(whole(self.shape))


def _root(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "little") % (PRIME - 3)


def _power_sum(root: int, low: int, size: int) -> int:
    """Sum of root**i over low <= i < low + size."""
    return pow(root, low, PRIME) * (pow(root, size, PRIME) - 1) * pow(root - 1, -1, PRIME) % PRIME


def tiling_defect(target: Box, boxes: Iterable[Box]) -> str:
    """What keeps the boxes from covering each element of `target` exactly once, in words; empty where nothing does.

    `TilingFingerprint` tells a hole and an overlap of one size from a tiling: who forges a checkpoint cannot know its
    weights.
    """
    parts = [part for box in boxes if (part := target.intersect(box)) is not None]
    if parts == [target]:
        return ""
    fingerprint = TilingFingerprint.of(_SALT, target.end)
    if sum(map(fingerprint.of_box, parts)) % PRIME == fingerprint.of_box(target):
        return ""
    rest = target.volume - sum(part.volume for part in parts)
    if rest > 0:
        return f"{rest} elements uncovered"
    return f"{-rest} elements covered twice" if rest else "some elements uncovered, as many covered twice"

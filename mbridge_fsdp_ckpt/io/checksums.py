# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""XXH3, 64 bit: fast enough to hash every byte that is written or read."""

from __future__ import annotations

from collections.abc import Buffer
from typing import Protocol

import xxhash

HASHED_AT_ONCE = 1 << 21
"""Bytes that are hashed as soon as they were read or written: few enough to be in the processor's cache still."""

_PREFIX = "xxh3_64:"


class Hashes(Protocol):
    """What bytes are handed to, one piece after the other."""

    def update(self, data: Buffer) -> None:
        """Add bytes."""


class Hasher:
    """A running checksum."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        """Add bytes."""
        self._state.update(data)

    def number(self) -> int:
        """The digest, 64 bits."""
        return int(self._state.intdigest())

    def result(self) -> str:
        """Algorithm and digest, as the manifest has it."""
        return _PREFIX + self._state.hexdigest()


def digest(data: Buffer) -> int:
    """Hash of bytes as a number of 64 bits."""
    return int(xxhash.xxh3_64_intdigest(data))


def as_text(number: int) -> str:
    """A digest as the manifest has it."""
    return f"{_PREFIX}{number:016x}"


def as_number(text: str) -> int:
    """A digest of the manifest's as a number.

    Raises:
        ValueError: It is none.
    """
    return int(text.removeprefix(_PREFIX), 16)


def checksum(data: Buffer) -> str:
    """Checksum of bytes."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.result()

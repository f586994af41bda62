# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a checkpoint, one thing at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import CheckpointError, StoreClientError
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.plan.tiling import PRIME, TilingFingerprint

Subject = Literal["manifest", "index", "file", "chunk", "tiling", "keys"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Args:
        subject: What it is about.
        file: The file's name in the checkpoint.
        expected: What should be there.
        found: What is there.
        key: The key, where it is about one.
        box: The damaged block of that key.
        span: The bytes of the file, [first, one past the last), that hold it.
    """

    subject: Subject
    file: str
    expected: str
    found: str
    key: str | None = None
    box: Box | None = None
    span: tuple[int, int] | None = None


class Tiling:
    """Whether chunks tile their keys, from sums: no chunk is kept."""

    def __init__(self, keys: Mapping[str, KeyEntry]) -> None:
        self._keys = keys
        self._fingerprints: dict[str, TilingFingerprint] = {}
        self._volumes: Counter[str] = Counter()
        self._shares: Counter[str] = Counter()

    def add(self, key: str, box: Box) -> None:
        """Count a block that lies inside its key."""
        if key not in self._fingerprints:
            self._fingerprints[key] = TilingFingerprint.of(key, self._keys[key].shape)
        self._volumes[key] += box.volume
        self._shares[key] = (self._shares[key] + self._fingerprints[key].of_box(box)) % PRIME

    def merge(self, other: Tiling) -> None:
        """Count what another counted."""
        self._volumes.update(other._volumes)
        for key, share in other._shares.items():
            self._shares[key] = (self._shares[key] + share) % PRIME

    def findings(self) -> Iterator[Finding]:
        """A finding for each key whose elements don't lie in exactly one chunk each."""
        for key, entry in self._keys.items():
            expected, found = whole(entry.shape).volume, self._volumes[key]
            fingerprint = TilingFingerprint.of(key, entry.shape)
            if found == expected and self._shares[key] == fingerprint.of_whole():
                continue
            said = "as many, but some twice and some never" if found == expected else f"{found} elements in its chunks"
            yield Finding("tiling", MANIFEST_NAME, f"each of {expected} elements in one chunk", said, key)


def of_unreadable(subject: Subject, file: str, error: OSError) -> Finding:
    """The finding for a file that the storage does not give.

    Raises:
        StoreClientError: The store did not answer: that says nothing of the file.
    """
    if isinstance(error, StoreClientError):
        raise error
    return Finding(subject, file, "a file that can be read", str(error))


def dcp_findings(source: DcpSource) -> Iterator[Finding]:
    """What can be seen of a checkpoint of torch's, stock's too: places, sizes, tiling.  It has no checksums."""
    for key in source.entries:
        tiling = Tiling({key: source.tensors[key]} if key in source.tensors else {})
        try:
            for chunk in source.look_at(key):
                if key in source.tensors:
                    tiling.add(key, chunk.box)
        except CheckpointError as error:
            file = (error.key or "").rpartition("/")[2]
            yield Finding("file", file, error.expected, error.found, key)
        else:
            yield from tiling.findings()

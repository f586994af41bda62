# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save cost this rank.

    Args:
        bytes: Bytes of payload that this rank wrote.
        bytes_of_all: Bytes of payload that all ranks wrote.
        seconds: Seconds by phase, in order: wait (for the save before; in asynchronous saves alone), plan, agree (the
            first meeting), write (copy to the host, hash and write), flush (what is not on disk yet), compare (hash
            copies that other ranks write), index (this rank's index file), commit (the second meeting; on rank 0 also
            the commit itself).
        duration: Seconds from the call to the end of the save.
        stalled: Seconds in which training could not go on: all of `duration`, unless the save was asynchronous.
    """

    bytes: int
    bytes_of_all: int
    seconds: Mapping[str, float]
    duration: float
    stalled: float

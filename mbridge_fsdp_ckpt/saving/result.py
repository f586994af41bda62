# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Bytes and seconds of a save.

    Args:
        bytes: Bytes of payload that this rank wrote.
        bytes_of_all: Bytes of payload that all ranks wrote.
        seconds: Seconds of this rank by phase, in order: wait (for the previous save; in asynchronous saves only),
            plan, agree (the first meeting), write (copy to the host, hash and write), flush (to disk), compare (hash
            copies that other ranks write), index (write this rank's index file), commit (the second meeting; on rank 0
            also the commit itself).
        duration: Seconds from the call to the end of the save.
        stalled: Seconds for which the save kept training waiting: all of `duration`, unless it was asynchronous.
    """

    bytes: int
    bytes_of_all: int
    seconds: Mapping[str, float]
    duration: float
    stalled: float

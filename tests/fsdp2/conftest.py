# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Worlds of 1, 2 and 4 ranks of torch alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fsdp2.ranks import Ranks


class Worlds:
    """By size; each starts when it is first asked for, and anew after a failure."""

    def __init__(self) -> None:
        self._started: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        if size in self._started and not self._started[size].is_of_use:
            self._started.pop(size).close()
        if size not in self._started:
            self._started[size] = Ranks(size)
        return self._started[size]

    def close(self) -> None:
        """End all."""
        for ranks in self._started.values():
            ranks.close()


@pytest.fixture(scope="package")
def worlds() -> Iterator[Worlds]:
    """All that were asked for end with the package."""
    found = Worlds()
    yield found
    found.close()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What memory a save takes beyond what was there, the processes that write for it included.

A thread looks every 20 ms at what is resident: private memory of this process and of those of its children that a kind
of save has begun, and memory that they share, once.  What a kind keeps from one save to the next counts each time:
its processes, and shared memory.  Steps take memory, too: as much as one took with nothing beside it is left out.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_EVERY_S, _CHILDREN_EVERY = 0.02, 5
_RESIDENT = re.compile(r"Rss(Anon|Shmem):\s+(\d+) kB")


@dataclass(slots=True)
class Watched:
    """One thing that goes on.

    Args:
        peak: Bytes at the most, so far.
        steps: Whether steps are taken meanwhile.
        next_look: When, by the monotonic clock.
    """

    peak: int = 0
    steps: bool = False
    next_look: float = 0.0

    def put_off(self) -> None:
        """The next look is a whole interval from now: none holds up a short call that begins."""
        self.next_look = time.monotonic() + _EVERY_S

    def due_in(self) -> float:
        """Seconds until the next look; none if it is due."""
        return max(self.next_look - time.monotonic(), 0.0)


class Usage:
    """Memory of this process and its children."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}  # children, by who began them
        self._kept: Counter[str] = Counter()  # shared memory, by whose it is
        self._of_a_step = 0

    @contextmanager
    def of_steps(self) -> Iterator[None]:
        """While the block runs, steps are taken with nothing beside them."""
        with self._watched("") as watched:
            yield
        self._of_a_step = watched.peak

    @contextmanager
    def of(self, kind: str) -> Iterator[Watched]:
        """While the block runs, a save of a kind goes on, as nothing else does."""
        before = _shared()
        with self._watched(kind) as watched:
            yield watched
        self._kept[kind] += _shared() - before

    @contextmanager
    def _watched(self, kind: str) -> Iterator[Watched]:
        watched, over = Watched(), threading.Event()
        watched.put_off()
        private, shared = _resident(os.getpid())
        shared -= self._kept[kind]
        self._find_children(kind)

        def look(number: int) -> None:
            if not number % _CHILDREN_EVERY:
                self._find_children(kind)
            own, own_shared = _resident(os.getpid())
            own -= private + (self._of_a_step if watched.steps else 0)
            theirs = [_resident(child) for child, owner in list(self._owners.items()) if owner == kind]
            total = max(own, 0) + sum(one for one, _ in theirs)
            watched.peak = max(watched.peak, total + max(own_shared - shared, *(one for _, one in theirs), 0))

        def look_on() -> None:
            number = 0
            while not over.wait(watched.due_in()):
                if watched.due_in():  # a call has begun meanwhile
                    continue
                look(number)
                number += 1
                watched.put_off()

        thread = threading.Thread(target=look_on, name="memory", daemon=True)
        thread.start()
        try:
            yield watched
        finally:
            over.set()
            thread.join()
            look(0)

    def _find_children(self, kind: str) -> None:
        """Whoever is new is this kind's, with all that it begins itself."""
        for child in descendants():
            self._owners.setdefault(child, kind)


def descendants() -> list[int]:
    """Processes that this one has begun, and all that they have."""
    found = _children(os.getpid())
    for process in found:  # it grows meanwhile
        found += _children(process)
    return found


def _shared() -> int:
    return _resident(os.getpid())[1]


def _resident(process: int) -> tuple[int, int]:
    """Bytes of a process's private memory, and of memory that it shares; none of one that has ended."""
    with suppress(OSError):
        found = dict(_RESIDENT.findall(Path(f"/proc/{process}/status").read_text()))
        if found:
            return 1024 * int(found["Anon"]), 1024 * int(found["Shmem"])
    return 0, 0


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                found += map(int, (task / "children").read_text().split())
    return found

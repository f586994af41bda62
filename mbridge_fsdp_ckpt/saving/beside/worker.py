"""Threads of the trainer that go on from save to save."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """Does one thing after the other, and waits for the next: to start a thread takes as long as the rest of a call.

    Where cores are few it takes milliseconds: whoever starts one waits until it has run.  Once this one is given
    something it waits for the interpreter's lock: who gave it that goes on first.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._given, self._done = 0, 0  # each is written by one thread alone
        self.start()

    @classmethod
    def after(cls, last: Worker | None, name: str) -> Worker:
        """The one that did the last thing, if it has; otherwise a new one, which waits for nothing of the old."""
        if last is not None and last.idle and last.is_alive():
            return last
        if last is not None:
            last._tasks.put(None)
        return cls(name)

    @property
    def idle(self) -> bool:
        """Whether it has done all that it was given."""
        return self._done == self._given

    def do(self, task: Callable[[], None]) -> None:
        """Have it done."""
        self._given += 1
        self._tasks.put(task)

    def run(self) -> None:
        """Do what it is given."""
        while (task := self._tasks.get()) is not None:
            task()
            self._done += 1

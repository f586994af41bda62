"""The thread that plans and copies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Stager(threading.Thread):
    """Does one thing after the other, and waits for the next: to start a thread takes as long as the rest of a call.

    Once it is given something it waits for the interpreter's lock: who gave it that goes on first.
    """

    def __init__(self) -> None:
        super().__init__(name="staging", daemon=True)
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Do what it is given."""
        while True:
            self.tasks.get()()

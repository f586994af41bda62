# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Messages between a training process and its checkpoint process: lines of JSON, descriptors of shared memory."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

Message = dict[str, Any]
"""One word, what belongs to it, and the id of the save that it is about: {"filled": 3, "save": 7}."""

_SLICES = 16
_READ_AT_ONCE = 1 << 20
_DESCRIPTORS = 4


def slices(limit: float) -> Iterator[float]:
    """A limit in seconds, as waits one after the other.

    Time limits count waits, and not the clock: a process that was stopped for hours comes back in the middle of one.
    """
    return repeat(limit / _SLICES, _SLICES)


def pulse_for(limit: float) -> float:
    """Seconds between two heartbeats, some of which may be late, where silence has a limit in seconds."""
    return min(1.0, limit / 8)


def encoded(message: Message) -> bytes:
    """A message as it is sent.

    Raises:
        TypeError: It holds something that JSON has no word for.
    """
    return json.dumps(message).encode() + b"\n"


class Channel:
    """One end of it.  Any thread may send; one receives.

    Args:
        end: A connected Unix socket; owned.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sending = end, threading.Lock()
        self._descriptors: deque[int] = deque()

    def send(self, text: bytes, descriptor: int | None = None) -> None:
        """Send an encoded message, and a descriptor with it.

        Raises:
            OSError: Nobody listens any more.
        """
        with self._sending:
            sent = 0 if descriptor is None else socket.send_fds(self._socket, [text], [descriptor])
            self._socket.sendall(memoryview(text)[sent:])

    def messages(self, pulse: float | None = None) -> Iterator[Message | None]:
        """Messages as they come, until the other end is closed; None after each `pulse` seconds in which none came."""
        ready, poller = bytearray(), select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            if not poller.poll(None if pulse is None else pulse * 1000):
                yield None
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_AT_ONCE, _DESCRIPTORS)
            except OSError:  # this end was closed, or the other with something unread
                return
            self._descriptors.extend(descriptors)
            if not data:
                return
            ready += data
            if b"\n" in data:
                *lines, ready = ready.split(b"\n")
                yield from map(json.loads, lines)

    def descriptor(self) -> int:
        """The descriptor that came first of those not asked for yet."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Hang up: the other end hears it, and `messages` ends here, too."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """In a forked child: close its copy, which the other end does not hear."""
        self._socket.close()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Requests to the job's rendezvous store, each with a limit.

torch's client waits for an answer for as long as the connection stands (2.13 `TCPStoreBackend.cpp`): a store whose host
is frozen, not dead, would hold every rank, and Ctrl-C would do nothing.  So a separate thread makes the requests, and
the calling thread waits for it with a limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol
from weakref import finalize

import torch.distributed as dist

_MARGIN = 1.0  # seconds that a wait inside the store may take beyond its own limit


class Store(Protocol):
    """The requests that this package makes to a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """The value of a key, which must be there."""

    def add(self, key: str, value: int) -> int:
        """Add to a counter; returns the sum."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a key if it has the expected value, or, where that is empty, no value; returns the value that holds."""

    def delete_key(self, key: str) -> bool:
        """Delete a key."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, which must be there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return once all keys are there; raise `DistStoreError` after the timeout."""

    def queue_push(self, key: str, value: str) -> None:
        """Append to a queue."""


_Asked = tuple[Future[Any], Callable[[Any], Any]]


class Connection:
    """A connection to the store, and the thread that makes its requests, one after the other.

    Args:
        connect: Makes the connection; called in that thread, with the first request.
    """

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._todo: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._todo.put((Future(), lambda _: connect()))
        self.usable = True
        """False once a request has failed or timed out.  The next request needs another connection."""
        threading.Thread(target=_serve, args=(self._todo,), name="rendezvous store", daemon=True).start()
        finalize(self, self._todo.put, None).atexit = False  # the thread ends when nobody can ask any more

    def ask[T](self, request: Callable[[dist.Store], T], limit: float) -> T:
        """Make a request and wait for its answer.  Any thread may call it.

        Args:
            request: Called with the store, in the connection's thread.
            limit: Seconds that the answer may take.

        Raises:
            TimeoutError: No answer came within the limit.
            DistError, OSError: The store failed.
        """
        answer: Future[T] = Future()
        self._todo.put((answer, request))
        try:
            return answer.result(limit)
        except dist.DistStoreError:  # a wait that came to nothing
            raise
        except TimeoutError as error:
            self.usable = False
            raise TimeoutError(f"no answer within {limit:g} s") from error
        except BaseException:
            self.usable = False
            raise

    def close(self) -> None:
        """Close the connection once all requests so far are answered."""
        self.usable = False
        self._todo.put(None)

    def within(self, limit: float) -> Store:
        """The store, all of whose requests have this limit in seconds."""
        return _Within(self, limit)


def _serve(todo: queue.SimpleQueue[_Asked | None]) -> None:
    """Make requests one after the other; the first one connects.  It keeps no reference to a request that is over."""
    store: Any = None
    failed: BaseException | None = None
    while (asked := todo.get()) is not None:
        answer, request = asked
        try:
            if failed is not None:
                raise failed
            if store is None:
                store = request(store)
            else:
                answer.set_result(request(store))
        except BaseException as error:
            failed = failed or (error if store is None else None)
            answer.set_exception(error)
        del asked, answer, request


class _Within:
    """A store, each of whose requests has a limit.

    Args:
        connection: The connection that makes the requests.
        limit: Seconds for each request.
    """

    def __init__(self, connection: Connection, limit: float) -> None:
        self._connection, self._limit = connection, limit

    def set(self, key: str, value: str) -> None:
        """See `Store`."""
        self._connection.ask(lambda store: store.set(key, value), self._limit)

    def get(self, key: str) -> bytes:
        """See `Store`."""
        return self._connection.ask(lambda store: store.get(key), self._limit)

    def add(self, key: str, value: int) -> int:
        """See `Store`."""
        return self._connection.ask(lambda store: store.add(key, value), self._limit)

    def check(self, keys: list[str]) -> bool:
        """See `Store`."""
        return self._connection.ask(lambda store: store.check(keys), self._limit)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """See `Store`."""
        return self._connection.ask(lambda store: store.compare_set(key, expected_value, desired_value), self._limit)

    def delete_key(self, key: str) -> bool:
        """See `Store`."""
        return self._connection.ask(lambda store: store.delete_key(key), self._limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `Store`."""
        return self._connection.ask(lambda store: store.multi_get(keys), self._limit)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """See `Store`."""
        self._connection.ask(lambda store: store.wait(keys, timeout), self._limit + timeout.total_seconds() + _MARGIN)

    def queue_push(self, key: str, value: str) -> None:
        """See `Store`."""
        self._connection.ask(lambda store: store.queue_push(key, value), self._limit)

    def has_extended_api(self) -> bool:
        """Whether `multi_get` works; a `TCPStore` has it."""
        return True

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading ahead: what is read next is on its way from the disk while what came before it is verified and used.

ranges     | a     | b | c   |   gap    | d |         in the order in which they will be read
requests   | 0       | 1     |          | 2 |         neighbours together, cut into pieces of a bounded size
readers      read 0, read 1, read 2, ...              several at a time, a bounded number ahead

Few small requests, as long as the storage answers soon: their reader waits least, as was measured.  Where an answer
takes its time, many: fewer would leave the storage idle.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from mbridge_fsdp_ckpt.errors import InternalError
from mbridge_fsdp_ckpt.io import buffers
from mbridge_fsdp_ckpt.io.reading import ALIGNED
from mbridge_fsdp_ckpt.io.store import AnyPath, Reader

REQUEST = 1 << 21
"""Bytes that are read at once, a multiple of `ALIGNED`: a huge page, of which smaller memory has none."""

FEW, MANY = 4, 16
"""Requests that are on their way, or are used: of a storage that answers soon, and of one that does not."""

SOON = 0.01
"""Seconds; a rank has 600 MB/s of a storage that takes as long for each of few requests."""

LATE = 8
"""Answers in a row that do not come soon: one alone has waited for others'."""

_LARGE = 1 << 16  # bytes that take longer to copy than to let others go on meanwhile
_GAP = 1 << 16  # bytes between two ranges that are read along: less than a request more would cost


class Range(NamedTuple):
    """Bytes of a file: that will be read; or that a request reads at once."""

    path: AnyPath
    offset: int
    length: int


def requests_for(ranges: Sequence[Range]) -> tuple[list[Range], list[int]]:
    """What to request of the storage.

    Args:
        ranges: What will be read, in this order.

    Returns:
        Requests at aligned places, and for each range the first one that has some of it; those that follow have the
        rest, each `REQUEST` bytes further on.
    """
    requests: list[Range] = []
    first: list[int] = []
    path, begin, end = None, 0, -1
    for each in ranges:
        if each.path != path or not begin <= each.offset <= end + _GAP:
            if path is not None:
                requests += _cut(path, begin, end)
            path, begin = each.path, each.offset - each.offset % ALIGNED
            end = begin
        first.append(len(requests) + (each.offset - begin) // REQUEST)
        end = max(end, each.offset + each.length)
    return requests + (_cut(path, begin, end) if path is not None else []), first


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without the interpreter's lock, for which threads that have read something wait."""
    if source.nbytes < _LARGE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _cut(path: AnyPath, begin: int, end: int) -> list[Range]:
    starts = range(begin, end, REQUEST)
    return [Range(path, start, -(-min(REQUEST, end - start) // ALIGNED) * ALIGNED) for start in starts]


class _UnderWay(NamedTuple):
    """A request, and where its bytes will be."""

    read: Future[int]
    memory: mmap.mmap


class Prefetch:
    """Reads ranges of files ahead, for one thread that takes them in order.  What it leaves out is skipped.

    Args:
        ranges: What will be read, in this order.
        open_reader: Opens a file.
    """

    def __init__(self, ranges: Sequence[Range], open_reader: Callable[[AnyPath], Reader]) -> None:
        self._requests, first = requests_for(ranges)
        self._first = dict(zip(reversed(ranges), reversed(first), strict=True))  # of two that are the same, the first
        self._open_reader = open_reader
        # a thread less than requests: one is used meanwhile, and with a thread for each, loads took longer
        self._threads = {number: ThreadPoolExecutor(number - 1, thread_name_prefix="reading") for number in (FEW, MANY)}
        self._late = 0  # answers in a row that did not come soon
        self._under_way: deque[_UnderWay] = deque()
        self._head = 0  # the request that was begun first of those under way
        self._readers: deque[tuple[AnyPath, int, Reader]] = deque()  # each with the last of its requests so far
        self._spare: list[mmap.mmap] = []

    def begin(self, asked: Range) -> Callable[[memoryview, int], int] | None:
        """See `store.Ranges`; None for what is not read ahead, or no more."""
        number = self._first.get(asked, -1)
        if number < self._head:
            return None
        within = asked.offset - self._requests[number].offset if number < len(self._requests) else 0

        def fill(memory: memoryview, start: int) -> int:
            filled = 0
            while filled < len(memory):
                further, at = divmod(within + start + filled, REQUEST)
                part = self._content(number + further)[at : at + len(memory) - filled]
                if not part.nbytes:
                    break
                copy(memory[filled : filled + part.nbytes], part)
                filled += part.nbytes
            return filled

        return fill

    def _content(self, number: int) -> memoryview:
        """What a request brought, until the next one is asked for.

        Raises:
            OSError: The storage refused.
        """
        if number < self._head:
            raise InternalError(expected=f"request {self._head} or a later one", found=f"{number}", remedy="Report it.")
        while self._head < number and self._under_way:
            self._release()
        if not self._under_way:
            self._head = max(self._head, number)
        while len(self._under_way) < self._wanted and self._head + len(self._under_way) < len(self._requests):
            self._submit(self._head + len(self._under_way))
        read, memory = self._under_way[0]
        return memoryview(memory)[: read.result()]

    @property
    def _wanted(self) -> int:
        """Requests to have under way."""
        return FEW if self._late < LATE else MANY

    def _submit(self, number: int) -> None:
        request, memory = self._requests[number], self._spare.pop() if self._spare else buffers.new_block(REQUEST)
        read: Future[int]
        try:
            reader = self._reader_of(request.path, number)
            threads = self._threads[self._wanted]
            read = threads.submit(self._read, reader, memoryview(memory)[: request.length], request.offset)
        except OSError as error:  # of a file that is not asked for yet
            read = Future()
            read.set_exception(error)
        self._under_way.append(_UnderWay(read, memory))

    def _read(self, reader: Reader, memory: memoryview, offset: int) -> int:
        """On a thread that reads."""
        begin = time.monotonic()
        count = reader.read(memory, offset)
        self._late = 0 if time.monotonic() - begin < SOON else self._late + 1
        return count

    def _reader_of(self, path: AnyPath, number: int) -> Reader:
        if self._readers and self._readers[-1][0] == path:
            reader = self._readers.pop()[2]
        else:
            reader = self._open_reader(path)
        self._readers.append((path, number, reader))
        return reader

    def _release(self) -> None:
        read, memory = self._under_way.popleft()
        wait([read])
        self._spare.append(memory)
        self._head += 1
        while self._readers and self._readers[0][1] < self._head and len(self._readers) > 1:
            self._readers.popleft()[2].close()

    def close(self) -> None:
        """End what is under way."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        while self._readers:
            self._readers.popleft()[2].close()

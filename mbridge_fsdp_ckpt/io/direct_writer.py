# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A new file that is appended to: past the page cache where the file system lets it, and while the next bytes are made.

    caller     fills block 1 | fills block 2 | fills block 3 | fills block 1 again, once it is written | ...
    helpers                  | write block 1 | write block 2 | write block 3

The page cache costs a copy and a page for every 4 KiB, and what it has gathered is flushed in the end.  With O_DIRECT
the disk takes a block from where it lies.  It takes whole sectors alone: the last bytes of a file go through the page
cache.  Where a file system knows no O_DIRECT, all bytes do, and are brought to disk while the file grows.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mbridge_fsdp_ckpt.io import buffers
from mbridge_fsdp_ckpt.io.reading import ALIGNED
from mbridge_fsdp_ckpt.io.writeback import WriteBack

BLOCK = 1 << 23
"""Bytes that are written at once."""

BLOCKS = 3
"""Blocks of memory that a file has: one that is filled, the others are on their way.  A fourth gained nothing."""

_HELPERS = 2  # one writes while the other is between two blocks


class _UnderWay(NamedTuple):
    """A block that a helper writes, up to a place in the file."""

    written: Future[None]
    memory: mmap.mmap
    end: int


class DirectWriter:
    """See `store.FileWriter`.  A file of one block needs no helpers: the caller writes it in the end.

    Args:
        path: A file that does not exist yet.

    Raises:
        OSError: The storage refused.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._output = _Output(self._file.fileno())
        self._write_back = WriteBack(self._file.fileno())
        self._helpers: ThreadPoolExecutor | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._blocks, self._memory = 0, buffers.new_block(BLOCK)
        self._start, self._filled = 0, 0
        self._refused: OSError | None = None

    def write(self, block: bytes | memoryview) -> None:
        """See `store.FileWriter`.  What a helper could not write is raised here or by `finish`, and from then on."""
        view = memoryview(block).cast("B")
        with self._refusal_kept():
            while view.nbytes:
                if self._filled == BLOCK:
                    self._pass_on(BLOCK)
                    self._memory = self._free_block()
                count = min(view.nbytes, BLOCK - self._filled)
                self._memory[self._filled : self._filled + count] = view[:count]
                self._filled += count
                view = view[count:]

    def finish(self) -> None:
        """See `store.FileWriter`."""
        in_sectors = self._filled - self._filled % ALIGNED if self._helpers is not None else 0
        rest = memoryview(self._memory)[in_sectors : self._filled]
        with self._refusal_kept():
            if in_sectors:
                self._pass_on(in_sectors)
            while self._under_way:
                self._await_oldest()
            if rest.nbytes:
                self._output.use_cache()
                self._output.write(rest, self._start)
            os.fsync(self._file.fileno())
        rest.release()
        self.close()

    def close(self) -> None:
        """See `store.FileWriter`.  What no helper has begun to write is dropped."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=True, cancel_futures=True)  # they use the descriptor
        self._file.close()
        self._under_way.clear()
        with suppress(BufferError):  # an error's traceback may still have a view of it
            self._memory.close()

    @contextmanager
    def _refusal_kept(self) -> Iterator[None]:
        """After an error the file has a hole: no later call may go well."""
        if self._refused is not None:
            raise self._refused
        try:
            yield
        except OSError as error:
            self._refused = error
            raise

    def _pass_on(self, length: int) -> None:
        """Let a helper write the beginning of the block."""
        if self._helpers is None:
            self._output.bypass_cache()
            self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="writing")
        view = memoryview(self._memory)[:length]
        written = self._helpers.submit(self._output.write, view, self._start)
        self._start, self._filled = self._start + length, 0
        self._under_way.append(_UnderWay(written, self._memory, self._start))

    def _free_block(self) -> mmap.mmap:
        self._blocks += 1
        return buffers.new_block(BLOCK) if self._blocks < BLOCKS else self._await_oldest()

    def _await_oldest(self) -> mmap.mmap:
        """Memory of the block that was passed on first, once it is written.

        Raises:
            OSError: The storage refused.
        """
        written, memory, end = self._under_way[0]
        written.result()
        if not self._output.bypasses_cache:
            self._write_back.reached(end)
        self._under_way.popleft()
        return memory


class _Output:
    """Writes to an open file, from any thread.

    Args:
        descriptor: The file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.bypasses_cache = descriptor, False

    def bypass_cache(self) -> None:
        """Bypass the page cache from here on, if the file system can."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        else:
            self.bypasses_cache = True

    def use_cache(self) -> None:
        """Write through the page cache from here on."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.bypasses_cache = False

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of it, at a place in the file.

        Raises:
            OSError: The storage refused.
        """
        while view.nbytes:
            bypassing = self.bypasses_cache
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not bypassing:
                    raise
                self.use_cache()  # it wants other sectors than these, or has taken a part of one
                continue
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            view, offset = view[count:], offset + count

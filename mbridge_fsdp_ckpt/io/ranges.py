# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading ranges of payload files, each opened once and kept open: what takes its name meanwhile is not read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, InternalError
from mbridge_fsdp_ckpt.io.checksums import HASHED_AT_ONCE, Hashes
from mbridge_fsdp_ckpt.io.prefetch import Prefetch, Range
from mbridge_fsdp_ckpt.io.store import AnyPath, Ranges, Reader, is_local, store_of

Bytes = npt.NDArray[np.uint8]

MAX_OPEN = 128
"""Files open at a time: half of what is left of the usual limit of 1,024 when sockets and libraries have theirs."""

_ARENA, _ALIGNED = 1 << 26, 64
_SMALL = 1 << 16  # a range of which one copy more costs less than to read it in three parts
_READ_AT_ONCE = 1 << 28  # where nothing is hashed


class ByteRange(NamedTuple):
    """Bytes [offset, end) of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


class Place(NamedTuple):
    """Memory for a part of what is read.

    Args:
        start: The first byte of that part.
        memory: As many bytes as the part has.
    """

    start: int
    memory: Bytes


_NOWHERE = Place(0, np.empty(0, dtype=np.uint8))


class Scratch:
    """Memory for one read after another: the kernel hands out and clears pages far slower than it reads cached ones.

    Args:
        progress: Called after every block that is read into it: a range may take minutes.
    """

    def __init__(self, progress: Callable[[], None] = lambda: None) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self.progress = progress

    def take(self, length: int) -> Bytes:
        """So many bytes, until the next call."""
        if self._memory.size < length:
            self._memory = np.empty(length, dtype=np.uint8)
        return self._memory[:length]


class Arena(Scratch):
    """Memory that stays: cut from large pieces, for which the kernel has huge pages where that is allowed.

    Args:
        progress: Called after every block that is read into it.
    """

    def __init__(self, progress: Callable[[], None] = lambda: None) -> None:
        super().__init__(progress)
        self._taken = 0

    def take(self, length: int) -> Bytes:
        """So many bytes, which nobody else gets."""
        start = -(-self._taken // _ALIGNED) * _ALIGNED
        if start + length > self._memory.size:
            start, self._memory = 0, np.empty(max(length, _ARENA), dtype=np.uint8)
        self._taken = start + length
        return self._memory[start : self._taken]


class OpenFiles:
    """Payload files of one checkpoint.  Of more than `MAX_OPEN`, those used last and those being read stay open."""

    def __init__(self) -> None:
        self._files: OrderedDict[AnyPath, Ranges] = OrderedDict()
        self._ahead: Prefetch | None = None

    @contextmanager
    def reading_ahead(self, ranges: Iterable[Range]) -> Iterator[None]:
        """While the block runs, read ranges before they are asked for, in this order; those of object stores are not.

        Args:
            ranges: What is going to be read.  What is not asked for after all is skipped.
        """
        local = [each for each in ranges if is_local(each.path)]
        if not local:
            yield
            return
        self._ahead = Prefetch(local, self._reader)
        try:
            yield
        finally:
            ahead, self._ahead = self._ahead, None
            ahead.close()

    def _reader(self, path: AnyPath) -> Reader:
        reader = self._file(path).reader()
        if reader is None:
            raise InternalError(expected="a file", found=str(path), remedy="Report it.")
        return reader

    def read(
        self, path: AnyPath, offset: int, length: int, hasher: Hashes | None = None, scratch: Scratch | None = None
    ) -> Bytes:
        """Bytes [offset, offset + length) of a file, hashed on the way; in the scratch memory, if there is some.

        Raises:
            DamagedCheckpointError: The file ends too early, or is gone.
            OSError: The storage refused.
        """
        data = np.empty(length, dtype=np.uint8) if scratch is None else scratch.take(length)
        step = _READ_AT_ONCE if hasher is None else HASHED_AT_ONCE
        fill = self._range_of(path, offset, length)
        for start in range(0, length, step):
            block = memoryview(data)[start : start + step]
            fill(block, start)
            if hasher is not None:
                hasher.update(block)
            if scratch is not None:
                scratch.progress()
        return data

    def pass_through(self, path: AnyPath, offset: int, length: int, hasher: Hashes, scratch: Scratch) -> None:
        """Hash bytes [offset, offset + length) of a file, which pass through a part of the scratch memory.

        Raises:
            DamagedCheckpointError: The file ends too early, or is gone.
            OSError: The storage refused.
        """
        self.read_part(path, offset, length, _NOWHERE, hasher, scratch)

    def read_part(
        self, path: AnyPath, offset: int, length: int, place: Place, hasher: Hashes | None, scratch: Scratch
    ) -> None:
        """Read bytes [offset, offset + length) of a file, hashed on the way, and keep a part of them.

        Args:
            path: The file.
            offset: The first byte.
            length: How many.
            place: Where a part of them goes; its `start` counts from the offset.
            hasher: Gets all of them.
            scratch: What is not kept passes through a part of it.

        Raises:
            DamagedCheckpointError: The file ends too early, or is gone.
            OSError: The storage refused.
        """
        fill = self._range_of(path, offset, length)
        if 0 < length <= _SMALL:
            whole = scratch.take(length)
            fill(memoryview(whole), 0)
            if hasher is not None:
                hasher.update(whole)
            place.memory[:] = whole[place.start : place.start + place.memory.size]
            scratch.progress()
            return
        for start, block in _blocks(length, place, scratch):
            fill(block, start)
            if hasher is not None:
                hasher.update(block)
            scratch.progress()

    def read_each(
        self, path: AnyPath, offset: int, lengths: Sequence[int], hasher: Hashes | None, scratch: Scratch
    ) -> Iterator[Bytes]:
        """Bytes of a file from an offset on, so many at a time, in the scratch memory, until the next ones are taken.

        Args:
            path: The file.
            offset: The first byte.
            lengths: How many bytes at a time.
            hasher: Gets all of them.
            scratch: The memory.

        Raises:
            DamagedCheckpointError: The file ends too early, or is gone.
            OSError: The storage refused.
        """
        fill, start = self._range_of(path, offset, sum(lengths)), 0
        for length in lengths:
            data = scratch.take(length)
            fill(memoryview(data), start)
            if hasher is not None:
                hasher.update(data)
            scratch.progress()
            start += length
            yield data

    def _range_of(self, path: AnyPath, offset: int, length: int) -> Callable[[memoryview, int], None]:
        """What fills memory with bytes of a range, from a place in it on."""
        read = None
        if self._ahead is not None:
            read = self._ahead.begin(Range(path, offset, length))
        if read is None:
            with _gone_named(path):
                read = self._file(path).begin(offset, length)

        def fill(memory: memoryview, start: int) -> None:
            with _gone_named(path):
                count = read(memory, start)
            if count < len(memory):
                raise DamagedCheckpointError(
                    expected=f"{length} bytes from byte {offset}",
                    found=f"{start + count} bytes",
                    remedy="The file was truncated: use another checkpoint.",
                    key=str(path),
                )

        return fill

    def _file(self, path: AnyPath) -> Ranges:
        if path not in self._files:
            if len(self._files) >= MAX_OPEN:
                self._files.popitem(last=False)  # a read that goes on keeps its file open
            self._files[path] = store_of(path).ranged()
        self._files.move_to_end(path)
        return self._files[path]


def _blocks(length: int, place: Place, scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
    """Where each block of a range goes: what comes before a place's part and after it, into the scratch memory."""
    end = place.start + place.memory.size
    for low, high in ((0, place.start), (place.start, end), (end, length)):
        for start in range(low, high, HASHED_AT_ONCE):
            size, within = min(HASHED_AT_ONCE, high - start), start - place.start
            kept = 0 <= within < place.memory.size
            yield start, memoryview(place.memory[within : within + size] if kept else scratch.take(size))


@contextmanager
def _gone_named(path: AnyPath) -> Iterator[None]:
    """The structure was checked: a file that is not there any more was there."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            expected="the file that was there when the checkpoint was opened",
            found="no such file: the checkpoint was replaced or removed while it was read",
            remedy="Load again, and let no job save to a checkpoint, or prune it, that another one is loading.",
            key=str(path),
        ) from error

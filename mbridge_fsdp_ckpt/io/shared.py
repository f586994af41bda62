# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bytes that processes of one host share: the first of them reads and verifies, the others map what it has read.

They lie in a file in memory whose name tells what they are; `flock` tells who may do what:

    exclusive    fill the file, or remove it
    shared       use the bytes, for as long as they are mapped

    bytes        what was read; none at all where each process is to read for itself
    mark         magic, length and checksum of the bytes, written last

A process that dies lets go of its lock, and the next one begins anew.  Who lets go last removes the file; one that is
left when all were killed is removed, or filled anew, by the next who shares anything.  What another user could write is
not used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import random
import stat
import struct
import time
import weakref
from collections.abc import Buffer, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from mbridge_fsdp_ckpt.io.checksums import Hasher, digest
from mbridge_fsdp_ckpt.io.ranges import Bytes

_log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PREFIX = "mbridge_fsdp_ckpt-"

WAIT_LIMIT = 60.0
"""Seconds that a process waits for the first one before it reads for itself."""

_MARK = struct.Struct("<8sQQ")
_MAGIC = b"FSDPHOST"
_PAUSES = 0.002, 0.02  # seconds between two looks, drawn: two that look together would find each other's lock


def once_a_host(what: str, parts: Callable[[], Iterable[Bytes]], *, wait_limit: float = WAIT_LIMIT) -> Bytes | None:
    """Bytes that all ranks of this host need, read by the first of them that asks.

    Args:
        what: Tells these bytes from all others: who says the same gets the same.
        parts: Reads and verifies them, one after another.  Called where this process is the first.
        wait_limit: Seconds to wait for the first.

    Returns:
        All parts in a row, read-only, there for as long as somebody refers to them.  None where each process is to read
        for itself: one a host, no memory to share or too little, a first one that failed or takes too long.

    Raises:
        Exception: What `parts` raises; the others get None, and see for themselves.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
        return None
    path = FOLDER / f"{PREFIX}{os.geteuid()}-{hashlib.sha256(what.encode(errors='surrogatepass')).hexdigest()}"
    try:
        file, is_first = _enter(path, time.monotonic() + wait_limit)
    except OSError as error:
        _log.info("Not shared among the ranks of this host: %s", error)
        return None
    if file is None:
        return None
    if is_first:
        try:
            file.fill(parts())
        except BaseException:
            file.release()
            raise
    return file.mapped()


def _enter(path: Path, deadline: float) -> tuple[_SharedFile | None, bool]:
    """The file, locked, and whether this process is to fill it; None where it is another user's, or took too long.

    What nobody uses any more is filled anew: who was killed left it, and the storage may say something else by now.

    Raises:
        OSError: There is no such folder, or it refuses.
    """
    _remove_others(path)
    file, drawing = _SharedFile(path), random.Random()  # the job's own generator is part of its state
    while time.monotonic() < deadline:
        if not file.is_ours():
            break
        if file.lock(fcntl.LOCK_EX) and file.is_in_place():
            return file, True
        if file.lock(fcntl.LOCK_SH):
            if file.is_complete():
                return file, False
            file.release()
            file = _SharedFile(path)
        time.sleep(drawing.uniform(*_PAUSES))
    file.release()
    return None, False


def _remove_others(path: Path) -> None:
    """Remove what nobody uses any more, of other bytes: all who did were killed."""
    for other in path.parent.glob(f"{PREFIX}{os.geteuid()}-*"):
        if other != path:
            with suppress(OSError):  # somebody else's
                _SharedFile(other).release()


class _SharedFile:
    """The file, open.

    Args:
        path: Its name.

    Raises:
        OSError: It cannot be opened, or is a link.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def is_ours(self) -> bool:
        """Whether nobody but this user can have written it, and it has no other name."""
        found = os.fstat(self._file)
        return (found.st_mode, found.st_uid) == (stat.S_IFREG | 0o600, os.geteuid()) and found.st_nlink <= 1

    def is_in_place(self) -> bool:
        """Whether it still has its name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), self._path.lstat())
        return False

    def lock(self, kind: int) -> bool:
        """Take a lock in place of the one that is held, if any; whether that could be done at once."""
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_complete(self) -> bool:
        """Whether the mark is there."""
        length = os.fstat(self._file).st_size - _MARK.size
        return length >= 0 and self._mark(length)[:2] == (_MAGIC, length)

    def _mark(self, length: int) -> tuple[bytes, int, int]:
        magic, said, checksum = _MARK.unpack(os.pread(self._file, _MARK.size, length))
        return magic, said, checksum

    def fill(self, parts: Iterable[Bytes]) -> None:
        """Write all parts and the mark; of parts that cannot be read, or for which there is no room, the mark alone."""
        os.ftruncate(self._file, 0)
        hasher, length, kept = Hasher(), 0, False
        try:
            kept = all(self._append(part, hasher) for part in parts)
            length = os.fstat(self._file).st_size
        finally:
            if not kept:
                os.ftruncate(self._file, 0)
                hasher, length = Hasher(), 0
            self._write(_MARK.pack(_MAGIC, length, hasher.number()))

    def _append(self, part: Bytes, hasher: Hasher) -> bool:
        """Whether a part was written: what others have in that memory must find as much room as all of ours."""
        room = os.fstatvfs(self._file)
        if room.f_bavail * room.f_frsize < os.fstat(self._file).st_size + 2 * part.nbytes:
            return False
        hasher.update(part)
        return self._write(part)

    def _write(self, data: Buffer) -> bool:
        """Append; whether there was room."""
        view, end = memoryview(data).cast("B"), os.fstat(self._file).st_size
        try:
            while view.nbytes:
                count = os.pwrite(self._file, view, end)
                view, end = view[count:], end + count
        except OSError as error:
            _log.info("Not shared among the ranks of this host: %s", error)
            return False
        return True

    def mapped(self) -> Bytes | None:
        """The bytes of the complete file, if it has some."""
        if not self.lock(fcntl.LOCK_SH) or not self.is_complete():  # somebody was between the two locks
            self.release()
            return None
        size = os.fstat(self._file).st_size
        try:
            mapping = mmap.mmap(self._file, size, prot=mmap.PROT_READ)
        except OSError as error:
            _log.info("Not shared among the ranks of this host: %s", error)
            self.release()
            return None
        weakref.finalize(mapping, self.release)
        found = np.frombuffer(mapping, dtype=np.uint8)[: size - _MARK.size]
        return found if found.size and digest(found) == self._mark(found.size)[2] else None

    def release(self) -> None:
        """Let go of it, as the last one to do so remove it."""
        # a process that was forked has the same lock: its parent's
        if os.getpid() == self._process and self.is_ours() and self.lock(fcntl.LOCK_EX) and self.is_in_place():
            self._path.unlink()
        os.close(self._file)

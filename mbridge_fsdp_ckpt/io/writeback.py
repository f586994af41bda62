# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bringing a file to disk while it grows.

The page cache takes hundreds of gigabytes before a write waits, and then the flush at the end takes an hour.  Here no
more than two windows of a file are ever on their way: one is being written while the next is filled.
"""

from __future__ import annotations

import ctypes
import errno
import os

WINDOW = 1 << 26
"""Bytes whose writing is begun at once: 0.7 s of a disk that writes 100 MB/s."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNKNOWN = errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ESPIPE


class WriteBack:
    """Of one open file that is only appended to.

    Args:
        descriptor: The file.
        window: Bytes.
    """

    def __init__(self, descriptor: int, window: int | None = None) -> None:
        self._descriptor, self._window = descriptor, window or WINDOW
        self._begun = 0

    def reached(self, position: int) -> None:
        """The file is so long now: begin to write its last full window, once the one before is on disk.

        Raises:
            OSError: The storage refused; the file is not to be trusted.
        """
        while position - self._begun >= self._window:
            if self._begun:
                sync_range(self._descriptor, self._begun - self._window, self._window, wait=True)
            sync_range(self._descriptor, self._begun, self._window, wait=False)
            self._begun += self._window


def sync_range(descriptor: int, start: int, length: int, *, wait: bool) -> None:
    """sync_file_range(2): begin to write a range, or wait until it is on disk; all that is written where there is none.

    Raises:
        OSError: The storage refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = errno.ENOSYS
    if hasattr(libc, "sync_file_range"):
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE
        where = ctypes.c_longlong(start), ctypes.c_longlong(length)
        if libc.sync_file_range(descriptor, *where, ctypes.c_uint(flags)) == 0:
            return
        code = ctypes.get_errno()
    if code not in _UNKNOWN:
        raise OSError(code, os.strerror(code))
    if wait:
        os.fdatasync(descriptor)

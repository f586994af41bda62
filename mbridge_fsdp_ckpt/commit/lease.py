# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Leases: a file or directory whose time the living renew, so that nobody takes it for a dead job's.

The storage gives these times, so its own clock tells how old they are: hosts' clocks differ from it and from each
other.  Where a file system takes times from its hosts instead (Lustre does), those that share a root must agree to
within three quarters of an hour.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.io.file_system import temporary_name
from mbridge_fsdp_ckpt.io.store import AnyPath, is_local, store_of

STALE_S = 3600.0
"""Seconds without a heartbeat after which a job is taken for dead."""

_log = logging.getLogger(__name__)
_ahead: dict[str, float] = {}
"""By directory: its storage's clock less this host's monotonic one, at the least so far."""


def now(directory: AnyPath) -> float:
    """The time by the storage's own clock: that of a small file which is made there, and removed.

    If the clock is set forward in this process's life, it is taken to go on as before: all leases would seem old until
    their holders renew them.  If it is set back, leases from before seem new, and last longer.

    Returns:
        UNIX time in seconds; minus infinity, so that nothing is old, where the storage refuses or tells no times.
    """
    file, begin = directory / temporary_name("clock"), time.monotonic()
    try:
        file.write_bytes(b"")
        store_of(file).touch()
        found = file.stat().st_mtime or -math.inf
    except OSError as error:
        _log.debug("%s does not tell the time: %s", directory, error)
        return -math.inf
    finally:
        with suppress(OSError):
            store_of(file).remove()
    _ahead[str(directory)] = min(found - begin, _ahead.get(str(directory), math.inf))
    return begin + _ahead[str(directory)]


def of_save(directory: AnyPath, files: Files) -> AnyPath:
    """What those who write a save renew: its staging directory, or in an object store an object of its own."""
    return directory if is_local(directory) else directory / files.lease


def is_stale(place: AnyPath) -> bool:
    """Whether nobody has renewed it for an hour.  A store that tells no times keeps what is in it for living."""
    try:
        return not is_fresh(place, now(place.parent))
    except FileNotFoundError:  # whoever held it is done
        return True


def is_fresh(place: AnyPath, time: float) -> bool:
    """Whether a file or directory was touched within the hour before a time that `now` gave.

    Raises:
        FileNotFoundError: It is gone.
    """
    touched = place.stat().st_mtime
    return touched == 0 or time - touched <= STALE_S  # 0: a store that does not tell


def renew(place: AnyPath) -> None:
    """Give a heartbeat.  That it could not be given fails nobody: another hour has to pass before it matters."""
    try:
        store_of(place).touch()
    except OSError as error:
        _log.debug("%s was not renewed: %s", place, error)


def renewing(place: AnyPath) -> Callable[[], None]:
    """What to call from time to time, as often as one likes."""
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if time.monotonic() - last > STALE_S / 10:
            last = time.monotonic()
            renew(place)

    return alive

"""Leases: a file or directory whose time the living renew, so that nobody takes it for a dead job's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mbridge_fsdp_ckpt.storage.store import AnyPath, store_of

STALE_S = 3600.0
"""Seconds without a sign of life after which a job is taken for dead."""

_log = logging.getLogger(__name__)


def is_stale(place: AnyPath) -> bool:
    """Whether nobody has renewed it for an hour.  A store that tells no times keeps what is in it for living."""
    try:
        touched = place.stat().st_mtime
        return touched > 0 and time.time() - touched > STALE_S
    except FileNotFoundError:  # whoever held it is done
        return True


def renew(place: AnyPath) -> None:
    """Give a sign of life.  That it could not be given fails nobody: another hour has to pass before it matters."""
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

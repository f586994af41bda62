# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Deleting in the background: nobody waits for it, and nothing fails by it.

Deleting a large checkpoint takes minutes on some storage.  What is not needed any more is renamed at once, so that
nobody takes it for a checkpoint, and deleted here: one thing after another, on a thread that does not keep the process
from ending.  What stays, because the storage refused or the process ended, a later save or `repair` finds.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable

from mbridge_fsdp_ckpt.io.store import AnyPath, store_of

EXIT_S = 5.0
"""Seconds that the end of the process waits for what is left to do."""

_log = logging.getLogger(__name__)
_state = threading.Condition()
_todo: deque[tuple[str, Callable[[], object]]] = deque()
_running = False


def later(what: str, action: Callable[[], object]) -> None:
    """Do something in the background, after all that was asked for before.

    Args:
        what: In words, for the log.
        action: Whatever it raises is logged.
    """
    global _running
    with _state:
        _todo.append((what, action))
        if _running:
            return
        _running = True
    try:
        threading.Thread(target=_work, name="mbridge_fsdp_ckpt.removal", daemon=True).start()
    except RuntimeError as error:  # no thread to be had
        _forget()
        _log.warning("%s: left to a later save, because no thread can be started: %s", what, error)


def delete_later(paths: Iterable[AnyPath]) -> None:
    """Delete files and directories in the background."""
    for path in paths:
        later(f"deleting {path}", lambda path=path: delete(path))  # type: ignore[misc]  # each its own


def wait(seconds: float | None) -> bool:
    """Wait until nothing is left to do, but no longer than that, if a number is given; whether nothing is."""
    with _state:
        return _state.wait_for(lambda: not _running, seconds)


def delete(path: AnyPath) -> bool:
    """Delete a file or a directory as far as the storage lets; whether it is gone.

    Another process may be deleting it as well.
    """
    failures: list[BaseException] = []
    try:
        local = store_of(path).local
        if local is not None and local.is_dir() and not local.is_symlink():
            shutil.rmtree(local, onexc=lambda function, place, error: failures.append(error))
        else:
            store_of(path).remove()
    except (OSError, RecursionError) as error:  # the latter: a thousand folders in each other
        failures.append(error)
    refused = [error for error in failures if not isinstance(error, FileNotFoundError)]
    if refused:
        _log.warning("%s could not be deleted and stays for a later save to delete: %s", path, refused[0])
    return not refused


def _work() -> None:
    global _running
    while True:
        with _state:
            if not _todo:
                _running = False
                _state.notify_all()
                return
            what, action = _todo.popleft()
        try:
            action()
        except Exception:
            _log.warning("%s: left to a later save", what, exc_info=True)


def _forget() -> None:
    """A forked process has no such thread, and its parent does the work."""
    global _state, _running
    _state, _running = threading.Condition(), False
    _todo.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(wait, EXIT_S)

"""Threads of the trainer that go on from save to save."""

from __future__ import annotations

import threading
import time

from mbridge_fsdp_ckpt.saving.beside.worker import Worker

LIMIT_S = 30


def test_one_thread_serves_one_save_after_the_other() -> None:
    did: list[threading.Thread] = []
    worker = None
    for _ in range(3):
        worker = Worker.after(worker, "staging")
        worker.do(lambda: did.append(threading.current_thread()))
        _until_idle(worker)
    assert did == [worker] * 3


def test_a_save_does_not_wait_for_what_hangs_in_the_one_before() -> None:
    """`add_files` may hang until its save has failed; the next save's is called all the same."""
    release, done = threading.Event(), threading.Event()
    hung = Worker.after(None, "asked by the writer")
    hung.do(lambda: _wait(release))
    following = Worker.after(hung, "asked by the writer")
    following.do(done.set)
    assert following is not hung
    assert done.wait(LIMIT_S)
    release.set()
    hung.join(LIMIT_S)
    assert not hung.is_alive()  # it is not kept once it has come back


def test_one_that_ended_by_an_error_is_replaced() -> None:
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        failed = Worker.after(None, "staging")
        failed.do(lambda: 1 // 0)  # type: ignore[arg-type]
        failed.join(LIMIT_S)
    finally:
        threading.excepthook = hook
    following, done = Worker.after(failed, "staging"), threading.Event()
    following.do(done.set)
    assert following is not failed
    assert done.wait(LIMIT_S)


def _wait(event: threading.Event) -> None:
    event.wait(LIMIT_S)


def _until_idle(worker: Worker) -> None:
    end = time.monotonic() + LIMIT_S
    while not worker.idle:
        assert time.monotonic() < end
        time.sleep(0.001)

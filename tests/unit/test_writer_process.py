"""The trainer's side of its writer: whoever has something to say to it does not wait until it listens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.errors import SaveAbandonedError
from mbridge_fsdp_ckpt.saving.beside.channel import Message
from mbridge_fsdp_ckpt.saving.beside.process import WriterProcess

LIMIT_S = 60.0
LONG = {"word": "x" * (1 << 22)}
"""More than a socket holds until somebody reads."""


class Heard:
    """Who listens."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def hear(self, message: Message) -> None:
        """Nothing that is of interest here."""

    def writer_ended(self, writer: WriterProcess, how: str) -> None:
        self.ended.set()


@pytest.fixture
def stopped() -> Iterator[tuple[WriterProcess, Heard]]:
    """A writer that reads nothing, as one that has only begun to start."""
    heard = Heard()
    writer = WriterProcess(heard, LIMIT_S, LIMIT_S)
    os.kill(writer.pid, signal.SIGSTOP)
    yield writer, heard
    if writer.lives:
        os.kill(writer.pid, signal.SIGKILL)
    assert heard.ended.wait(LIMIT_S)
    writer.stop()


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_what_is_said_waits_for_nobody(stopped: tuple[WriterProcess, Heard]) -> None:
    """The first save's plan of many tensors waited for the writer to start, and the optimizer's step for both."""
    writer, _ = stopped

    def say() -> None:
        for _ in range(3):
            writer.send(LONG)

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(LIMIT_S / 6)
    assert not saying.is_alive()


def test_a_writer_that_has_ended_is_told_nothing(stopped: tuple[WriterProcess, Heard]) -> None:
    writer, heard = stopped
    with Path(os.devnull).open("rb") as file:
        writer.send(LONG, file.fileno())
        writer.send(LONG, file.fileno())
        before = _open_files()
        os.kill(writer.pid, signal.SIGKILL)
        assert heard.ended.wait(LIMIT_S)
        writer._teller.join(LIMIT_S)
        assert _open_files() < before, "copies of the descriptor are closed"
    with pytest.raises(SaveAbandonedError, match="exit status -9"):
        writer.send({"word": "more"})

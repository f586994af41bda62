"""The writer of saves beside the training, told what to do by a trainer that loses no time."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.agree.elsewhere import Seat
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.beside.channel import Channel, Message
from mbridge_fsdp_ckpt.saving.beside.handle import Saving
from mbridge_fsdp_ckpt.saving.beside.process import WriterProcess, pulse_for
from mbridge_fsdp_ckpt.saving.beside.trainer import Trainer
from mbridge_fsdp_ckpt.saving.beside.writing import Writer
from mbridge_fsdp_ckpt.settings import Settings

LIMIT_S = 10.0


class Watched(Writer):
    """Notes whether a save is the one for which what the trainer stages is taken."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, pulse=1.0)
        self.known: list[bool] = []

    def _save(self, task: Any) -> Any:
        self.known.append(self._task is task)
        return super()._save(task)

    def begun(self) -> int:
        """Which save has been asked for last, and not ended."""
        return 0 if self._task is None else int(self._task.asked["save"])


class Hurried(Channel):
    """A writer's end: the trainer has begun the next save before the writer has finished telling of the first."""

    trainer: Channel
    writer: Watched
    second: Message

    def send(self, message: Message, descriptor: int | None = None) -> None:
        super().send(message, descriptor)
        if "failed" in message and len(self.writer.known) == 1:
            self.trainer.send(self.second)
            deadline = time.monotonic() + LIMIT_S
            while self.writer.begun() != 2 and time.monotonic() < deadline:
                time.sleep(0.001)


def order(number: int, directory: Path) -> Message:
    """A save that could not be planned."""
    error = ConfigurationError(expected="a plan", found="none", remedy="None.")
    seat = Seat(f"save to {directory}", 0, 1, LIMIT_S, LIMIT_S)
    return {
        "save": number,
        "seat": seat.to_wire(),
        "target": str(directory),
        "settings": asdict(Settings()),
        "adds_files": False,
        "follows_up": False,
        "phases": Phases().to_wire(),
        "failed": error.to_wire(),
    }


def test_a_save_may_begin_as_soon_as_the_one_before_has_ended(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    trainer, end = Channel(ours), Hurried(theirs)
    writer = Watched(end)
    end.trainer, end.writer, end.second = trainer, writer, order(2, tmp_path / "b")
    serving = threading.Thread(target=writer.serve, daemon=True)
    serving.start()
    trainer.send(order(1, tmp_path / "a"))
    heard = (message for message in trainer.messages() if "alive" not in message)
    assert ["failed" in next(heard), "failed" in next(heard)] == [True, True]
    trainer.close()
    serving.join(LIMIT_S)
    assert writer.known == [True, True]


def test_the_end_of_a_writer_that_was_replaced_is_not_the_next_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word may come when another writer has begun already."""
    heard: list[str] = []
    saving = Saving("iter_0000002", Seat("save", 0, 1, LIMIT_S, LIMIT_S), None, None, print)
    monkeypatch.setattr(saving, "writer_ended", heard.append)
    trainer, (old, new) = Trainer(), (object.__new__(WriterProcess) for _ in range(2))
    trainer._saving, trainer._writer = saving, new
    trainer.writer_ended(old, "the one before")
    trainer.writer_ended(new, "its own")
    assert heard == ["its own"]


@pytest.mark.parametrize(("limit", "pulse"), [(0.4, 0.05), (1.0, 0.125), (2.0, 0.25), (8.0, 1.0), (600.0, 1.0)])
def test_a_writer_gives_eight_signs_or_more_within_its_limit(limit: float, pulse: float) -> None:
    assert pulse_for(limit) == pulse

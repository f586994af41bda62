# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The checkpoint process, told what to do by a training process that loses no time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.background import wire
from mbridge_fsdp_ckpt.saving.background.channel import Channel, Message, encoded, pulse_for
from mbridge_fsdp_ckpt.saving.background.checkpoint_main import Writer
from mbridge_fsdp_ckpt.saving.background.memory import Staging
from mbridge_fsdp_ckpt.settings import Settings
from tests.unit.test_beside_memory import write_plan

LIMIT_S = 10.0


class Watched(Writer):
    """Notes whether a save is the one for which what the training process stages is taken."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, 1.0, os.getppid())
        self.known: list[bool] = []

    def _save(self, task: Any) -> Any:
        self.known.append(self._task is task)
        return super()._save(task)

    def begun(self) -> int:
        """Which save has been asked for last, and not ended."""
        return 0 if self._task is None else int(self._task.asked["save"])


class Hurried(Channel):
    """A checkpoint process's end: the next save has begun before that has finished telling of the first."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.between: Callable[[], None] = lambda: None

    def send(self, text: bytes, descriptor: int | None = None) -> None:
        super().send(text, descriptor)
        if b'"failed"' in text:
            self.between()


class Both:
    """A training process, as far as it speaks, and its checkpoint process in another thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel, self.end, self.staging = Channel(ours), Hurried(theirs), Staging.create(2)
        self.writer = Watched(self.end)
        self._serving = threading.Thread(target=self.writer.serve, daemon=True)
        self._serving.start()
        self.heard = (told for told in self.channel.messages() if told and not {"alive", "hello"} & set(told))

    def say(self, message: Message) -> None:
        """Send it."""
        self.channel.send(encoded(message), self.staging.descriptor if "capacity" in message else None)

    def begin(self, number: int, directory: Path, *, asks: bool = False) -> None:
        """Hand over a save of nothing."""
        participant = Participant(f"save to {directory}", 0, 1, LIMIT_S, LIMIT_S)
        what = write_plan([])
        message = {
            "begin": True,
            "save": number,
            "participant": participant.to_wire(),
            "target": str(directory),
            "working": "",
            "settings": asdict(Settings()),
            "adds_files": asks,
            "follows_up": False,
            "phases": Phases().to_wire(),
            "values": {},
            "planned": wire.to_wire(what),
            "layout": wire.layout_to_wire(wire.layout_of(what)),
            "capacity": 2,
        }
        self.say(message)
        self.say({"digests": [], "save": number})

    def close(self) -> None:
        """The training process ends."""
        self.channel.close()
        self._serving.join(LIMIT_S)
        assert not self._serving.is_alive()


@pytest.fixture
def both() -> Iterator[Both]:
    started = Both()
    yield started
    started.close()


def test_a_save_may_begin_as_soon_as_the_one_before_has_ended(both: Both, tmp_path: Path) -> None:
    taken = tmp_path / "a"
    taken.write_text("no directory")

    def next_one() -> None:
        both.end.between = lambda: None
        both.begin(2, taken)
        deadline = time.monotonic() + LIMIT_S
        while both.writer.begun() != 2 and time.monotonic() < deadline:
            time.sleep(0.001)

    both.end.between = next_one
    both.begin(1, taken)
    told = [next(both.heard), next(both.heard)]
    assert [("failed" in message, message["save"]) for message in told] == [(True, 1), (True, 2)]
    assert both.writer.known == [True, True]


def test_what_is_said_of_another_save_is_dropped(both: Both, tmp_path: Path) -> None:
    """An answer that comes late is no answer to the next save's question."""
    error = ConfigurationError(expected="files", found="none", remedy="None.")
    both.begin(2, tmp_path / "b", asks=True)
    asked = next(both.heard)
    assert (asked["ask"], asked["save"]) == ("add_files", 2)
    stales: list[Message] = [{"answer": None}, {"filled": 7}, {"digests": []}, {"broken": error.to_wire()}]
    for stale in stales:
        both.say({**stale, "save": 1})
    both.say({"answer": error.to_wire(), "save": 2})
    assert next(both.heard)["failed"]["found"] == "none"


@pytest.mark.parametrize(("limit", "pulse"), [(0.4, 0.05), (1.0, 0.125), (2.0, 0.25), (8.0, 1.0), (600.0, 1.0)])
def test_a_checkpoint_process_gives_eight_heartbeats_or_more_within_its_limit(limit: float, pulse: float) -> None:
    assert pulse_for(limit) == pulse

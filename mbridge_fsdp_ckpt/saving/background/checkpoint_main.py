# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The checkpoint process: saves what its training process stages, one save after the other, until that has ended."""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError, SaveAbandonedError, brief, describe_unexpected
from mbridge_fsdp_ckpt.format.values import decode_mapping_or_null
from mbridge_fsdp_ckpt.io.store import as_path
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.background import wire
from mbridge_fsdp_ckpt.saving.background.arriving import Arriving
from mbridge_fsdp_ckpt.saving.background.channel import Channel, Message, encoded, slices
from mbridge_fsdp_ckpt.saving.background.checkpoint_process import identity
from mbridge_fsdp_ckpt.saving.background.handle import DOING
from mbridge_fsdp_ckpt.saving.background.memory import Staging
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.result import SaveResult
from mbridge_fsdp_ckpt.saving.run import give_up, run
from mbridge_fsdp_ckpt.saving.write_plan import WritePlan
from mbridge_fsdp_ckpt.saving.writer import Watching
from mbridge_fsdp_ckpt.settings import Settings

_NICE = 10  # what this process computes may wait for what the training does
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Task:
    """One save, as its training process handed it over."""

    asked: Message
    participant: Participant
    write_plan: WritePlan
    arriving: Arriving
    answers: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    coordination: Coordination | None = None

    def hear(self, message: Message) -> None:
        """What the training process says of it.  Of the thread that listens."""
        self.arriving.hear(message)
        if "answer" in message:
            self.answers.put(message["answer"])


class Writer:
    """Serves one training process.

    Args:
        channel: The connection to the training process.
        pulse: Seconds between two heartbeats that it gets.
        parent: The training process.
    """

    def __init__(self, channel: Channel, pulse: float, parent: int) -> None:
        self._channel, self._pulse_s, self._parent = channel, pulse, parent
        self._todo: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._task: _Task | None = None
        self._staging: Staging | None = None
        self._layout: wire.Layout = ([], {})
        self._orphaned = threading.Event()

    def serve(self) -> None:
        """Save until the training process has ended."""
        self._tell(hello=identity())
        threading.Thread(target=self._listen, name="training process", daemon=True).start()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        while self._serves():
            pass

    def _serves(self) -> bool:
        """Do the next save; False if there will be none.  Nothing of it is left when this returns."""
        task = self._todo.get()
        if task is None:
            return False
        ending = self._ending(task)
        self._task = None  # before the training process hears of it and begins the next one
        self._tell(**ending, save=task.asked["save"])
        return True

    def _ending(self, task: _Task) -> Message:
        """Save; what to tell of it.  What ranks have agreed on is sent as it is."""
        try:
            return {"done": asdict(self._save(task))}
        except CheckpointError as error:
            return {"failed": error.to_wire()}
        except Exception as error:
            _log.exception("rank %d failed while %s", task.participant.rank, DOING)
            return {"failed": describe_unexpected(error, rank=task.participant.rank, doing=DOING).to_wire()}

    def _save(self, task: _Task) -> SaveResult:
        asked = task.asked
        task.coordination = task.participant.take()
        job = Job(
            as_path(asked["target"]),
            _settings(asked["settings"]),
            task.coordination,
            decode_mapping_or_null(asked["values"]),
            (lambda directory: self._ask(task, "add_files", str(directory))) if asked["adds_files"] else None,
            (lambda: self._ask(task, "after_commit")) if asked["follows_up"] else None,
            Path(asked["working"]) if asked["working"] else None,
        )
        return run(job, Outcome(task.write_plan), lambda: task.arriving, Watching(Phases.from_wire(asked["phases"])))

    def _ask(self, task: _Task, what: str, directory: str = "") -> None:
        """Let the training process do something, and wait until it has.  One that has ended is answered for.

        Raises:
            CheckpointError: What that raised there, or that the training process has ended.
        """
        self._tell(ask=what, directory=directory, save=task.asked["save"])
        if (answer := task.answers.get()) is not None:
            raise CheckpointError.from_wire(answer)

    def _tell(self, **message: Any) -> None:
        try:
            self._channel.send(encoded(message))
        except OSError as error:
            _log.debug("the training process has ended: %s", error)

    def _listen(self) -> None:
        found = "that it has ended"
        try:
            for message in self._channel.messages():
                self._hear(message or {})
        except BaseException as error:
            _log.exception("the checkpoint process does not understand its training process")
            found = f"words that the checkpoint process fails at: {brief(error)}"
        try:
            self._orphan(found)
        finally:
            self._todo.put(None)

    def _hear(self, message: Message) -> None:
        task = self._task
        if "begin" in message:
            self._begin(message)
        elif "release" in message:
            self._release()
        elif task is not None and task.asked["save"] == message["save"]:
            task.hear(message)
        else:
            _log.debug("of a save that has ended: %s", message)

    def _begin(self, asked: Message) -> None:
        if "capacity" in asked:
            self._release()
            self._staging = Staging(self._channel.descriptor(), asked["capacity"])
        if "layout" in asked:
            self._layout = wire.layout_from_wire(asked["layout"])
        assert self._staging is not None
        participant, save = Participant.from_wire(asked["participant"]), asked["save"]
        write_plan = wire.from_wire(asked["planned"], self._layout, participant.rank)
        arriving = Arriving(
            write_plan,
            self._staging,
            save,
            freed=lambda portions: self._tell(freed=portions, save=save),
            limit=participant.time_limit + participant.storage_limit,
        )
        self._task = _Task(asked, participant, write_plan, arriving)
        self._todo.put(self._task)

    def _release(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _pulse(self) -> None:
        """Heartbeats, while the work goes on or nothing is to be done; and a look whether the training process lives.

        Its other children may keep the channel open after it has died.
        """
        while not self._orphaned.wait(self._pulse_s):
            if os.getppid() != self._parent:
                self._channel.close()
            elif not self._is_stuck():
                self._tell(alive=True)
        if (task := self._task) is not None:
            for pause in slices(task.participant.time_limit + task.participant.storage_limit):
                time.sleep(pause)
            os._exit(1)

    def _is_stuck(self) -> bool:
        task = self._task
        return task is not None and task.coordination is not None and task.coordination.has_stopped

    def _orphan(self, found: str) -> None:
        """The training process is no more: give up what is not committed, within the time limit."""
        self._orphaned.set()
        task = self._task
        if task is None:
            return
        error = SaveAbandonedError(
            expected="the training process to live until its asynchronous save has ended",
            found=found,
            remedy="Look at that rank's log. A resume finds the last whole checkpoint.",
        ).at_rank(task.participant.rank, DOING)
        task.hear({"broken": error.to_wire(), "answer": error.to_wire()})
        try:
            give_up(task.participant.take(), error)
        except CheckpointError as error:
            _log.info("given up: %s", error)


def _settings(data: dict[str, Any]) -> Settings:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Settings(**given)


class _LogForwarder(logging.Handler):
    """Lets the training process log what is logged here."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Of any thread."""
        text = self.format(record)
        try:
            self._channel.send(encoded({"log": [record.levelno, record.name, text]}))
        except OSError:  # the training process has ended: whoever looks, looks at the terminal
            sys.stderr.write(f"{text}\n")


def main() -> None:
    """Serve until the training process has ended.  Started by it (`process`) with a socket, a pulse and its id."""
    descriptor, pulse, parent = sys.argv[1:4]
    channel = Channel(socket.socket(fileno=int(descriptor)))
    log = logging.getLogger("mbridge_fsdp_ckpt")
    log.setLevel(logging.INFO)
    log.addHandler(_LogForwarder(channel))
    log.propagate = False
    os.nice(_NICE)
    Writer(channel, float(pulse), int(parent)).serve()
    removal.wait(removal.EXIT_S)
    os._exit(0)  # to take down torch takes a nice process seconds on a busy machine, and the training process waits

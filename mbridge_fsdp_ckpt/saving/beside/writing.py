"""The writer: a process that saves what its trainer stages, one save after the other, until its trainer has ended."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.agree.agreement import Agreement
from mbridge_fsdp_ckpt.agree.elsewhere import Seat
from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError, SaveAbandonedError, brief, describe_unexpected
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.beside import wire
from mbridge_fsdp_ckpt.saving.beside.arriving import Arriving
from mbridge_fsdp_ckpt.saving.beside.channel import Channel, Message
from mbridge_fsdp_ckpt.saving.beside.memory import Staging
from mbridge_fsdp_ckpt.saving.commit import Job
from mbridge_fsdp_ckpt.saving.outgoing import Elements, Outgoing
from mbridge_fsdp_ckpt.saving.run import give_up, run
from mbridge_fsdp_ckpt.saving.saved import Saved
from mbridge_fsdp_ckpt.saving.writer import Watching
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.format.values import decode_mapping_or_null
from mbridge_fsdp_ckpt.storage.store import as_path

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Task:
    """One save, as its trainer asked for it."""

    asked: Message
    seat: Seat
    planned: Outcome[Outgoing]
    arriving: Arriving | None
    agreement: Agreement | None = None

    def elements(self) -> Elements:
        """Of a save that could be planned."""
        assert self.arriving is not None
        return self.arriving

    def fail(self, error: CheckpointError) -> None:
        """Nothing more will come from the trainer."""
        if self.arriving is not None:
            self.arriving.broken(error)


class Writer:
    """Serves one trainer.

    Args:
        channel: To it.
        pulse: Seconds between two signs of life that it gets.
    """

    def __init__(self, channel: Channel, pulse: float) -> None:
        self._channel, self._pulse_s, self._trainer = channel, pulse, os.getppid()
        self._todo: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._task: _Task | None = None
        self._staging: Staging | None = None
        self._layout: wire.Layout = ([], {})
        self._orphaned = threading.Event()

    def serve(self) -> None:
        """Save until the trainer has ended."""
        threading.Thread(target=self._listen, name="trainer", daemon=True).start()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        while (task := self._todo.get()) is not None:
            ending = self._ending(task)
            self._task = None  # before the trainer hears of it and begins the next one
            self._tell(**ending)

    def _ending(self, task: _Task) -> Message:
        """Save; what to tell the trainer of it.  What ranks have agreed on is told as it is."""
        try:
            return {"done": asdict(self._save(task))}
        except CheckpointError as error:
            return {"failed": error.to_wire()}
        except Exception as error:
            doing = "saving beside the training"
            _log.exception("rank %d failed while %s", task.seat.rank, doing)
            return {"failed": describe_unexpected(error, rank=task.seat.rank, doing=doing).to_wire()}

    def _save(self, task: _Task) -> Saved:
        asked, phases = task.asked, Phases.from_wire(task.asked["phases"])
        task.agreement = task.seat.take()
        job = Job(
            as_path(asked["target"]),
            _settings(asked["settings"]),
            task.agreement,
            decode_mapping_or_null(asked.get("values")),
            self._add_files if asked["adds_files"] else None,
            self._after_commit if asked["follows_up"] else None,
            Path(asked["working"]) if asked["working"] else None,
        )
        return run(job, task.planned, task.elements, Watching(phases))

    def _add_files(self, directory: Path) -> None:
        self._ask({"ask": "add_files", "directory": str(directory)})

    def _after_commit(self) -> None:
        self._ask({"ask": "after_commit"})

    def _ask(self, message: Message) -> None:
        """Let the trainer do something, and wait until it has.  One that has ended is answered for: see `_orphan`.

        Raises:
            CheckpointError: What that raised there, or that the trainer has ended.
        """
        self._tell(**message)
        answer = self._answers.get()
        if answer["answer"] is not None:
            raise CheckpointError.from_wire(answer["answer"])

    def _tell(self, **message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError as error:
            _log.debug("the trainer has ended: %s", error)

    def _listen(self) -> None:
        handlers: dict[str, Callable[[Message], None]] = {
            "save": self._begin,
            "filled": self._arrives,
            "digests": self._arrives,
            "broken": self._arrives,
            "answer": self._answers.put,
            "release": lambda message: self._release(),
        }
        found = "that it has ended"
        try:
            for message in self._channel.messages():
                handlers[next(iter(message))](message)
        except Exception as error:
            _log.exception("the writer does not understand its trainer")
            found = f"words that the writer fails at: {brief(error)}"
        self._orphan(found)

    def _arrives(self, message: Message) -> None:
        """What the trainer stages; of a save that has failed meanwhile, nobody wants it."""
        task = self._task
        if task is None or task.arriving is None or task.asked["save"] != message["save"]:
            return
        if "filled" in message:
            task.arriving.filled(message["filled"])
        elif "digests" in message:
            task.arriving.hashed(dict(message["digests"]))
        else:
            task.arriving.broken(CheckpointError.from_wire(message["broken"]))

    def _begin(self, asked: Message) -> None:
        if "slots" in asked:
            self._release()
            self._staging = Staging(self._channel.descriptor(), asked["slots"])
        if "layout" in asked:
            self._layout = wire.layout_from_wire(asked["layout"])
        self._task = self._task_of(asked, Seat.from_wire(asked["seat"]))
        self._todo.put(self._task)

    def _task_of(self, asked: Message, seat: Seat) -> _Task:
        if "failed" in asked:
            return _Task(asked, seat, Outcome(CheckpointError.from_wire(asked["failed"])), None)
        outgoing = wire.from_wire(asked["planned"], self._layout, seat.rank)
        assert self._staging is not None
        limit = seat.time_limit + seat.storage_limit
        arriving = Arriving(outgoing, self._staging, asked["save"], lambda portions: self._tell(freed=portions), limit)
        return _Task(asked, seat, Outcome(outgoing), arriving)

    def _release(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _pulse(self) -> None:
        """Signs of life, while the work goes on or nothing is to be done; and a look whether the trainer lives.

        A trainer's other children may keep the socket open after it has died.
        """
        while not self._orphaned.wait(self._pulse_s):
            if os.getppid() != self._trainer:
                self._orphan("that it has ended")
                return
            task = self._task
            if task is None or task.agreement is None or not task.agreement.has_stopped:
                self._tell(alive=True)

    def _orphan(self, found: str) -> None:
        """The trainer is no more: give up what is not committed, within the time limit."""
        if self._orphaned.is_set():
            return
        self._orphaned.set()
        task = self._task
        if task is None:
            self._todo.put(None)
            return
        late = threading.Timer(task.seat.time_limit + task.seat.storage_limit, os._exit, [1])
        late.daemon = True
        late.start()
        error = SaveAbandonedError(
            expected="the trainer to live until its save beside the training has ended",
            found=found,
            remedy="Look at that rank's log. A resume finds the last whole checkpoint.",
        ).at_rank(task.seat.rank, "saving beside the training")
        task.fail(error)
        self._answers.put({"answer": error.to_wire()})
        try:
            give_up(task.seat.take(), error)
        except CheckpointError as told:
            _log.info("given up: %s", told)
        self._todo.put(None)


def _settings(data: dict[str, Any]) -> Settings:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Settings(**given)

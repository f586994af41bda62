"""One save beside the training, as the trainer sees it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mbridge_fsdp_ckpt.agree.elsewhere import Seat
from mbridge_fsdp_ckpt.errors import CheckpointError, describe_unexpected
from mbridge_fsdp_ckpt.phases import tell
from mbridge_fsdp_ckpt.saving.beside.channel import Message
from mbridge_fsdp_ckpt.saving.beside.process import ended
from mbridge_fsdp_ckpt.saving.run import give_up
from mbridge_fsdp_ckpt.saving.saved import Saved

_log = logging.getLogger(__name__)

Answer = Callable[[Message], None]


class Saving:
    """A save that goes on while training does.

    Args:
        directory: Where to, as all ranks call it.
        seat: This rank's, in the meetings.
        add_files: See `checkpoint.save`.
        after_commit: See `checkpoint.save`.
        answer: Tells the writer what these came to.
    """

    def __init__(
        self,
        directory: str,
        seat: Seat,
        add_files: Callable[[Path], None] | None,
        after_commit: Callable[[], None] | None,
        answer: Answer,
    ) -> None:
        self.directory, self._seat = directory, seat
        self._add_files, self._after_commit, self._answer = add_files, after_commit, answer
        self._changed = threading.Condition()
        self._taken, self._over, self._given_up, self._freed = False, False, False, 0
        self._asks: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._asked = 0
        self._saved: Saved | None = None
        self._error: CheckpointError | None = None
        self.raised = False
        """Whether its error has been raised."""
        self.stalled = 0.0
        """Seconds that training has waited for it so far."""

    @property
    def taken(self) -> bool:
        """Whether all of it is copied: nothing that happens to model and optimizer any more is part of it."""
        return self._taken

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not, and nothing of it is still being copied."""
        return self._over and self._taken

    def ended_on_all(self) -> bool:
        """Whether it has ended, as the first rank finds that asks: the same on all, which ask equally often.

        Where another rank has heard it first, this one waits until it does.  One request to the store.

        Raises:
            RankMissingError: The store does not answer.
        """
        self._asked += 1
        word = self._seat.first_says("ended" if self._over else "goes on", f"asked {self._asked}")
        if word == "ended":
            self.wait()
        return word == "ended"

    @property
    def error(self) -> CheckpointError | None:
        """What it failed with."""
        return self._error

    def wait_until_taken(self) -> None:
        """Wait until all of it is copied, or it has failed: from then on tensors may change, move or be freed."""
        if self._taken:
            return
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._taken)
        self.stalled += time.monotonic() - start

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        with self._changed:
            self._changed.wait_for(lambda: self.done)

    def result(self) -> Saved:
        """Wait until it has ended; what it cost.

        Raises:
            CheckpointError: The same on every rank; the checkpoint before stands.
        """
        self.wait()
        if self._error is not None:
            self.raised = True
            raise self._error
        assert self._saved is not None
        return self._saved

    def set_taken(self) -> None:
        """All is copied, or nothing more will be.  Of the thread that copies."""
        with self._changed:
            self._taken = True
            self._changed.notify_all()

    def wait_for_slot(self, portion: int, slots: int) -> None:
        """Wait until the writer has read what lies where a portion is to be.

        Raises:
            CheckpointError: The save has failed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._freed > portion - slots)
            if self._over:
                raise self._error or ended("it has ended")

    def hear(self, message: Message) -> None:
        """What the writer says.  Of the thread that listens."""
        if "freed" in message:
            with self._changed:
                self._freed = message["freed"]
                self._changed.notify_all()
        elif "ask" in message:  # it may take long, and there is more to hear
            self._asks.put(message)
        elif "done" in message:
            self._end(replace(Saved(**message["done"]), stalled=self.stalled), None)
        elif "failed" in message:
            self._end(None, CheckpointError.from_wire(message["failed"]))

    def writer_ended(self, how: str) -> None:
        """The writer is no more.  Of the thread that listens."""
        self.give_up(ended(how))

    def give_up(self, error: CheckpointError) -> None:
        """Bring an error to the meetings in the writer's place: it won't come, or has ended.  Of any thread."""
        with self._changed:
            if self._over or self._given_up:
                return
            self._given_up = True
        rank, doing = self._seat.rank, "saving beside the training"
        error = error.at_rank(rank, doing)
        try:
            total = give_up(self._seat.take(), error)
        except CheckpointError as told:
            self._end(None, told)
        except Exception as unexpected:  # whoever waits for the end must not wait for ever
            _log.exception("rank %d failed while %s", rank, doing)
            self._end(None, describe_unexpected(unexpected, rank=rank, doing=doing))
        else:  # the ranks had committed it by then
            self._end(Saved(0, total, {}, 0.0, self.stalled), None)

    def serve(self) -> None:
        """Do what the writer asks, until the save has ended.  Only rank 0's asks.

        Of a thread that is there with the save: none can begin once the interpreter ends, which waits for the save.
        """
        while (message := self._asks.get()) is not None:
            answer = self._called(message)
            try:
                self._answer({"answer": answer})
            except CheckpointError as error:
                _log.debug("nobody waits for the answer any more: %s", error)

    def _called(self, message: Message) -> object:
        """Call what the caller of the save gave; returns its error as data, None where it went well."""
        try:
            if message["ask"] == "add_files" and self._add_files is not None:
                self._add_files(Path(message["directory"]))
            if message["ask"] == "after_commit" and self._after_commit is not None:
                self._after_commit()
        except Exception as error:
            if not isinstance(error, CheckpointError):
                _log.exception("%s failed for %s", message["ask"], self.directory)
            return describe_unexpected(error, rank=self._seat.rank, doing=f"calling {message['ask']}").to_wire()
        return None

    def _end(self, saved: Saved | None, error: CheckpointError | None) -> None:
        with self._changed:
            if self._over:
                return
        if saved is not None and self._seat.rank == 0:
            tell("save", self.directory, saved, stalled=saved.stalled)
        if error is not None:
            _log.error("the save to %s failed, which the next save raises, or the end: %s", self.directory, error)
        with self._changed:
            self._saved, self._error = saved, error
            self._over = True
            self._changed.notify_all()
        self._asks.put(None)

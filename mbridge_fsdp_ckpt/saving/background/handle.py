# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One asynchronous save, as the training process sees it: copying -> writing -> ended."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Self

from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    ErrorData,
    SaveAbandonedError,
    brief,
    describe_unexpected,
)
from mbridge_fsdp_ckpt.phases import tell
from mbridge_fsdp_ckpt.saving.background.channel import Message
from mbridge_fsdp_ckpt.saving.result import SaveResult
from mbridge_fsdp_ckpt.saving.run import give_up

DOING = "saving asynchronously"

_log = logging.getLogger(__name__)
_complained = False


class SaveHandle:
    """An asynchronous save, as `async_save` returns it: copying, then writing, then ended.

    Args:
        number: Its id in all messages between the training process and the checkpoint process.
        directory: The directory that is saved to, as all ranks call it.
        participant: This rank's part in the meetings.
    """

    def __init__(self, number: int, directory: str, participant: Participant) -> None:
        self.number, self.directory, self._participant = number, directory, participant
        self._process, self._changed = os.getpid(), threading.Condition()
        self._copying, self._giving_up, self._freed = True, False, 0
        self._asks: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.capacity = 0
        """Portions of staging memory that it has."""
        self.send: Callable[[Message], None] = lambda message: None
        """To the checkpoint process, once it was handed over."""
        self._saved: SaveResult | None = None
        self._failed: ErrorData | None = None  # an error itself would keep the frames that it passed
        self.raised = False
        """Whether its error has been raised."""
        self.stalled = 0.0
        """Seconds that training has waited for this save so far."""
        self.skipped = False
        """Whether the save was left out because the one before goes on, as `Settings.when_busy` allows."""

    @classmethod
    def of_skipped(cls, directory: str, participant: Participant) -> Self:
        """The handle of a save that was left out: it has ended, without a byte."""
        handle = cls(0, directory, participant)
        handle.skipped, handle._copying, handle._saved = True, False, SaveResult(0, 0, {}, 0.0, 0.0)
        return handle

    @property
    def state(self) -> Literal["copying", "writing", "ended"]:
        """What the save is doing.  A failed save counts as copying until nothing is copied any more.

        Raises:
            ConfigurationError: The handle is asked in a forked child; so does each method that waits.
        """
        if os.getpid() != self._process:
            raise ConfigurationError(
                expected="the handle of a save to be asked in the process that saves",
                found=f"process {os.getpid()}, forked from process {self._process}",
                remedy="Ask it there, and tell the other process of the answer.",
            )
        return "copying" if self._copying else "ended" if self._over else "writing"

    @property
    def taken(self) -> bool:
        """Whether everything is copied: later changes of model and optimizer are not part of the save."""
        return self.state != "copying"

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self.state == "ended"

    @property
    def _over(self) -> bool:
        return self._saved is not None or self._failed is not None

    def ended_on_all(self, asked: str) -> bool:
        """Whether the save has ended: one answer for all ranks, which is that of the first rank that asks.

        All ranks call it.  If the answer is that it has ended, a rank on which it has not waits until it has.  One
        request to the rendezvous store.

        Args:
            asked: A name of the question that is the same on all ranks and new each time, such as the training step.

        Raises:
            RankMissingError: The store does not answer.
        """
        word = self._participant.first_says("ended" if self.done else "goes on", f"asked {asked}")
        if word == "ended":
            self.wait()
        return word == "ended"

    def join(self) -> None:
        """Begin its meetings, if that has not been done.  What hinders that, the save fails with."""
        with suppress(CheckpointError):
            _ = self._participant.name

    @property
    def error(self) -> CheckpointError | None:
        """The error that the save failed with; None while it goes on, or if it was committed.  Raises nothing."""
        return None if self._failed is None else CheckpointError.from_wire(self._failed)

    def wait_until_taken(self) -> None:
        """Wait until everything is copied, or the save has failed.  Then tensors may change, move or be freed."""
        if self.taken:
            return
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
        self.stalled += time.monotonic() - start

    def wait(self) -> None:
        """Wait until the save has ended, committed or failed.  Its error is not raised."""
        if not self.done:
            with self._changed:
                self._changed.wait_for(lambda: self._over and not self._copying)

    def result(self) -> SaveResult:
        """Wait until the save has ended; returns its bytes and seconds.

        Raises:
            CheckpointError: The save failed.  The same on every rank; the checkpoint before stands.
        """
        self.wait()
        if self._saved is not None:
            return self._saved
        self.raised = True
        assert self._failed is not None
        raise CheckpointError.from_wire(self._failed)

    def set_taken(self) -> None:
        """All is copied, or nothing more will be.  Of the save's thread."""
        with self._changed:
            self._copying = False
            self._changed.notify_all()

    def tell(self, **message: object) -> None:
        """Tell the checkpoint process something of it.

        Raises:
            CheckpointError: That has ended, and with it the save.
            TypeError: It cannot be sent.
        """
        self.send({**message, "save": self.number})

    def filled(self, portions: int) -> None:
        """See `filling.Consumer`."""
        self.tell(filled=portions)

    def wait_for_slot(self, portion: int) -> None:
        """See `filling.Consumer`.

        Raises:
            CheckpointError: The save has failed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._freed > portion - self.capacity)
            if self._over:
                raise self.error or ended("it has ended")

    def hear(self, message: Message) -> None:
        """What the checkpoint process says of it.  Of the thread that listens."""
        if "freed" in message:
            with self._changed:
                self._freed = message["freed"]
                self._changed.notify_all()
        elif "ask" in message:  # it may take long, and there is more to hear
            self._asks.put(message)
        elif "done" in message:
            self._end(SaveResult(**message["done"]))
        elif "failed" in message:
            self._end(CheckpointError.from_wire(message["failed"]))

    def serve(self, answer: Callable[[Message], None]) -> None:
        """Let everything be answered that the checkpoint process asks, until the save has ended.  Of its thread."""
        while (ask := self._asks.get()) is not None:
            answer(ask)

    def give_up(self, error: BaseException) -> None:
        """Bring an error to the meetings in the checkpoint process's place: it won't come, or has ended.

        Of any thread; the save has ended when it returns.
        """
        with self._changed:
            if self._over or self._giving_up:
                return
            self._giving_up = True
        rank = self._participant.rank
        try:
            total = give_up(self._participant.take(), describe_unexpected(error, rank=rank, doing=DOING))
        except CheckpointError as error:
            self._end(error)
        except BaseException as unexpected:  # whoever waits for the end must not wait for ever
            say(_log.exception, "rank %d failed while %s", rank, DOING)
            self._end(describe_unexpected(unexpected, rank=rank, doing=DOING))
        else:  # the ranks had committed it by then
            self._end(SaveResult(0, total, {}, 0.0, 0.0))

    def _end(self, ending: SaveResult | CheckpointError) -> None:
        if self._over:
            return
        saved = replace(ending, stalled=self.stalled) if isinstance(ending, SaveResult) else None
        if isinstance(ending, CheckpointError):
            say(
                _log.error, "the save to %s failed; the next save, or the last call, raises: %s", self.directory, ending
            )
        elif saved is not None and self._participant.rank == 0:
            say(tell, "save", self.directory, saved, stalled=saved.stalled)
        with self._changed:
            self._saved = saved
            self._failed = ending.to_wire() if isinstance(ending, CheckpointError) else None
            self._changed.notify_all()
        self._asks.put(None)


def ended(how: str) -> SaveAbandonedError:
    """The error for a checkpoint process that is no more."""
    return SaveAbandonedError(
        expected="the process that writes this rank's save to live until that has ended",
        found=how,
        remedy="Was it killed, say for memory? A resume finds the last whole checkpoint. The next save starts another.",
    )


def say(log: Callable[..., object], *args: object, **more: object) -> None:
    """Log something.  A handler of the user's that raises ends no thread that a save needs; the first is reported."""
    global _complained
    try:
        log(*args, **more)
    except BaseException as error:
        if not _complained:
            _complained = True
            sys.stderr.write(f"mbridge_fsdp_ckpt cannot log, which is not said again: {brief(error)}\n")

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
        number: The id of the save in all messages between the training process and the checkpoint process.
        directory: The directory that the save writes, spelled alike on all ranks.
        participant: This rank's part in the meetings.
    """

    def __init__(self, number: int, directory: str, participant: Participant) -> None:
        self.number, self.directory, self._participant = number, directory, participant
        self._process, self._changed = os.getpid(), threading.Condition()
        self._copying, self._giving_up, self._freed = True, False, 0
        self._asks: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.capacity = 0
        """Portions of staging memory that the save may use."""
        self.send: Callable[[Message], None] = lambda message: None
        """Sends a message to the checkpoint process, once the save was handed over to it."""
        self._saved: SaveResult | None = None
        self._failed: ErrorData | None = None  # an error itself would keep the frames that it passed
        self.raised = False
        """Whether the error of the save has been raised."""
        self.stalled = 0.0
        """Seconds that training has waited for this save so far."""
        self.skipped = False
        """Whether the save was left out because the previous one was in progress, as `Settings.when_busy` allows."""

    @classmethod
    def of_skipped(cls, directory: str, participant: Participant) -> Self:
        """The handle of a save that was left out.  It has ended, and has written no bytes."""
        handle = cls(0, directory, participant)
        handle.skipped, handle._copying, handle._saved = True, False, SaveResult(0, 0, {}, 0.0, 0.0)
        return handle

    @property
    def state(self) -> Literal["copying", "writing", "ended"]:
        """The state of the save.  A failed save is "copying" until its copy has stopped.

        Raises:
            ConfigurationError: The handle is used in a forked child.  Methods that wait raise it, too.
        """
        if os.getpid() != self._process:
            raise ConfigurationError(
                expected="the handle of a save to be used in the process that saves",
                found=f"process {os.getpid()}, forked from process {self._process}",
                remedy="Use the handle in the process that saves, and pass the answer on.",
            )
        return "copying" if self._copying else "ended" if self._over else "writing"

    @property
    def taken(self) -> bool:
        """Whether all tensors are copied.  Later changes of model and optimizer are not part of the save."""
        return self.state != "copying"

    @property
    def done(self) -> bool:
        """Whether the save has ended, committed or failed."""
        return self.state == "ended"

    @property
    def _over(self) -> bool:
        return self._saved is not None or self._failed is not None

    def ended_on_all(self, asked: str) -> bool:
        """Whether the save has ended, with the same answer on all ranks: that of the first rank that calls.

        All ranks call it.  If the answer is True, a rank on which the save has not ended yet waits until it has.  Each
        call makes one request to the rendezvous store.

        Args:
            asked: A name for this call that is the same on all ranks and new each time, such as the training step.

        Raises:
            RankMissingError: The store does not answer.
        """
        answer = self._participant.first_says("ended" if self.done else "in progress", f"asked {asked}")
        if answer == "ended":
            self.wait()
        return answer == "ended"

    def join(self) -> None:
        """Begin the meetings of the save, if they have not begun.  If that fails, the save fails with the error."""
        with suppress(CheckpointError):
            _ = self._participant.name

    @property
    def error(self) -> CheckpointError | None:
        """The error that the save failed with; None while it is in progress or if it was committed.  Raises nothing."""
        return None if self._failed is None else CheckpointError.from_wire(self._failed)

    def wait_until_taken(self) -> None:
        """Wait until all tensors are copied, or the save has failed.  Then they may be changed, moved or freed."""
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
            CheckpointError: The save failed.  The same on every rank; the previous checkpoint stands.
        """
        self.wait()
        if self._saved is not None:
            return self._saved
        self.raised = True
        assert self._failed is not None
        raise CheckpointError.from_wire(self._failed)

    def set_taken(self) -> None:
        """Note that all tensors are copied, or that the copy has stopped.  Called by the save's thread."""
        with self._changed:
            self._copying = False
            self._changed.notify_all()

    def tell(self, **message: object) -> None:
        """Send a message about this save to the checkpoint process.

        Raises:
            CheckpointError: The checkpoint process has ended, and with it the save.
            TypeError: The message cannot be sent.
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
        """Take a message of the checkpoint process about this save.  Called by the thread that listens."""
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
        """Answer the requests of the checkpoint process until the save has ended.  Called by the save's thread."""
        while (ask := self._asks.get()) is not None:
            answer(ask)

    def give_up(self, error: BaseException) -> None:
        """Bring an error to the meetings in place of the checkpoint process, which has ended or was never started.

        Any thread may call it.  The save has ended when it returns.
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
        except BaseException as unexpected:  # a thread that waits for the end must not wait for ever
            say(_log.exception, "rank %d failed while %s", rank, DOING)
            self._end(describe_unexpected(unexpected, rank=rank, doing=DOING))
        else:  # the ranks had committed it by then
            self._end(SaveResult(0, total, {}, 0.0, 0.0))

    def _end(self, ending: SaveResult | CheckpointError) -> None:
        if self._over:
            return
        saved = replace(ending, stalled=self.stalled) if isinstance(ending, SaveResult) else None
        if isinstance(ending, CheckpointError):
            say(_log.error, "the save to %s failed; the next save or finish_saves raises: %s", self.directory, ending)
        elif saved is not None and self._participant.rank == 0:
            say(tell, "save", self.directory, saved, stalled=saved.stalled)
        with self._changed:
            self._saved = saved
            self._failed = ending.to_wire() if isinstance(ending, CheckpointError) else None
            self._changed.notify_all()
        self._asks.put(None)


def ended(how: str) -> SaveAbandonedError:
    """The error for a checkpoint process that has ended."""
    return SaveAbandonedError(
        expected="the checkpoint process of this rank to live until the save has ended",
        found=how,
        remedy="Check whether it was killed, for instance for lack of memory. A resume finds the last whole "
        "checkpoint. The next save starts another process.",
    )


def say(log: Callable[..., object], *args: object, **more: object) -> None:
    """Log something, and survive a logging handler that raises: it must not end a thread that a save needs.

    The first exception is reported on standard error.
    """
    global _complained
    try:
        log(*args, **more)
    except BaseException as error:
        if not _complained:
            _complained = True
            sys.stderr.write(f"mbridge_fsdp_ckpt cannot log (reported once): {brief(error)}\n")

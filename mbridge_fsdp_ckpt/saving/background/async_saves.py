# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves, as the training process begins, awaits and ends them: one at a time, in order."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.coordination.incarnation import base_of, default_store
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError, brief, describe_unexpected
from mbridge_fsdp_ckpt.saving.background import wire
from mbridge_fsdp_ckpt.saving.background.channel import Message
from mbridge_fsdp_ckpt.saving.background.checkpoint_process import CheckpointProcess
from mbridge_fsdp_ckpt.saving.background.filling import Copies, Filling, OnHost, OnStream
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle, ended, say
from mbridge_fsdp_ckpt.saving.background.memory import Staging, capacity_for, length_of
from mbridge_fsdp_ckpt.saving.background.order import Frozen, Order, Snapshot
from mbridge_fsdp_ckpt.saving.snapshot import Prepared
from mbridge_fsdp_ckpt.settings import Settings

_HEARTBEATS = 8  # within the time limit, in place of a checkpoint process that starts
_CALL_FIRST_S = 1e-4  # a thread that begins would keep the interpreter for 5 ms, and the call waiting
_log = logging.getLogger(__name__)


class AsyncSaves:
    """The asynchronous saves of this process: at most one is in progress."""

    def __init__(self) -> None:
        self._writer: CheckpointProcess | None = None
        self._saving: SaveHandle | None = None
        self._saves, self._to_release = 0, 0
        self._lock = threading.Lock()  # a save begins, or memory is given back
        self._served: dist.Store | None = None  # it serves for as long as somebody refers to it
        self._owed: CheckpointError | None = None
        self._blocks = 0

    def begin(self, order: Order) -> SaveHandle:
        """Begin a save.  The previous one must have ended.

        State that is not copied yet on return may change only in `optimizer.step()`, which waits for the copy.
        """
        _hook()
        with self._lock:
            self._saves += 1
        saving, replayed = SaveHandle(self._saves, order.directory, order.participant), False
        try:
            self._served = base_of(default_store()) if order.participant.world_size > 1 else None
            frozen = order.frozen()
            replayed = frozen.message(lambda own: own.observed.may_be_replayed) is True
            on_device = frozen.message(lambda own: own.observed.tensors.is_on_device) is True
            copies: Copies = OnStream() if on_device else OnHost()
            writer = self._writer_for(order.settings, order.participant)
            arguments = saving, order, writer, frozen, copies
            thread = threading.Thread(target=self._live, args=arguments, name=f"save {self._saves}", daemon=True)
            self._saving = saving
            thread.start()
        except Exception as error:  # no process, no thread: no rank can save
            say(_log.exception, "rank %d cannot begin to save", order.participant.rank)
            saving.set_taken()
            saving.give_up(error)
        self._saving = saving
        saving.stalled += order.phases.elapsed
        if replayed:  # torch calls no hook before such a step
            saving.wait_until_taken()
        return saving

    def wait_until_taken(self) -> None:
        """Wait until the snapshot is taken.  Call it before tensors change."""
        if self._saving is not None:
            self._saving.wait_until_taken()

    def skips(self, participant: Participant, settings: Settings) -> bool:
        """Whether to leave a save out because the previous one is in progress; rank 0 decides for all ranks.

        Args:
            participant: This rank's part in the new save's meetings.
            settings: The settings of the new save; only `when_busy="skip"` leaves saves out.
        """
        if settings.when_busy != "skip":
            return False
        busy = self._saving is not None and not self._saving.done
        if busy and self._saving is not None:
            self._saving.join()  # sequences are begun in the order of the calls, on all ranks
        skipped = participant.rank_0_says("busy" if busy else "free") == "busy"
        if skipped and participant.rank == 0:
            _log.warning("skipped: %s; the previous save is still in progress", participant.purpose)
        return skipped

    @contextmanager
    def old_error_last(self) -> Iterator[None]:
        """A block around a new save, after which an error of the previous save is raised, once.

        The new save has ended by then, so that an error that ends the job does not lose it.  Blocks may be nested.

        Raises:
            CheckpointError: The error of the previous save, if it was not raised yet: the same on every rank.  If the
                new save has failed as well, the error of the new save, with a note of the other.
        """
        self._blocks += 1
        try:
            yield
            if self._blocks == 1 and self._owed is not None:
                self.end_last()
        except CheckpointError as error:
            if self._blocks > 1:
                raise
            self._owe(error)
        finally:
            self._blocks -= 1
        if self._blocks == 0 and self._owed is not None:
            owed, self._owed = self._owed, None
            raise owed

    def end_last(self) -> None:
        """Wait for the previous save, if there is one.  Keep its error to raise it later, unless it was raised."""
        saving = self._saving
        if saving is None:
            return
        saving.wait()  # where a signal ends the wait, the save stays in progress: the next call waits for it
        self._saving = self._served = None
        if saving.error is not None and not saving.raised:
            saving.raised = True
            self._owe(saving.error)

    def _owe(self, error: CheckpointError) -> None:
        if self._owed is not None:
            error.add_note(f"The previous save has failed, too: {self._owed}")
        self._owed = error

    def settle(self) -> None:
        """Wait for the previous save, if there is one.

        Raises:
            CheckpointError: The save failed, and its error was not raised yet.  The same on every rank.
        """
        with self.old_error_last():
            self.end_last()

    def release(self, *, wait: bool = True) -> None:
        """Free staging memory once a save in progress has been written.

        Args:
            wait: Whether to wait for that; see `checkpoint.release_staging`.
        """
        if wait and self._saving is not None:
            self._saving.wait()
        with self._lock:
            self._to_release = self._saves
            if self._saving is None or self._saving.done:
                self._give_back(self._saves)

    def _give_back(self, number: int) -> None:
        """Free staging memory if `release` was called and no save has begun since the one with this number."""
        writer = self._writer
        if number == self._saves == self._to_release and writer is not None and writer.staging is not None:
            with suppress(CheckpointError):  # with a process that has ended its share has gone
                writer.send({"release": True})
            writer.drop_staging()

    def stop(self) -> None:
        """Wait for a save in progress, committed or failed, and end the checkpoint process."""
        if self._saving is not None:
            self._saving.wait()
        self._saving = self._served = self._owed = None
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()

    def forget(self) -> None:
        """Close what a forked child has inherited; it has no threads that save."""
        if self._writer is not None:
            self._writer.forget()

    def _writer_for(self, settings: Settings, participant: Participant) -> CheckpointProcess:
        if self._writer is None or self._writer.error is not None:
            if self._writer is not None:
                self._writer.drop_staging()
            self._writer = writer = CheckpointProcess(settings.storage_limit, settings.time_limit)
            if self._served is not None:
                threading.Thread(
                    target=_vouch, args=(writer, participant), name="checkpoint process starts", daemon=True
                ).start()
        return self._writer

    def _live(
        self, saving: SaveHandle, order: Order, writer: CheckpointProcess, frozen: Outcome[Frozen], copies: Copies
    ) -> None:
        """Do all that a save needs in this process.  Runs in the save's thread; if it raises, the save fails."""
        try:
            time.sleep(_CALL_FIRST_S)
            self._copy(saving, order, writer, frozen, copies)
            saving.serve(lambda ask: _answer(ask, saving, order))
        except BaseException as error:
            failed = ended(f"the thread of the save failed: {brief(error)}")
            writer.kill(failed)
            saving.set_taken()
            saving.give_up(failed)
        finally:
            with self._lock:
                self._give_back(saving.number)

    def _copy(
        self, saving: SaveHandle, order: Order, writer: CheckpointProcess, frozen: Outcome[Frozen], copies: Copies
    ) -> None:
        """Plan the save, hand it over to the checkpoint process, and copy its tensors."""
        handed_over = False
        try:
            with copies.reading():  # of state in 8 or 16 bits an optimizer makes what is saved
                snapshot = order.planned(frozen).brought
            if isinstance(snapshot, CheckpointError):
                raise snapshot
            self._announce(saving, writer, order, snapshot, copies)
            handed_over = True
            self._fill(saving, writer.staging, snapshot.prepared, order.settings.replicas, copies)
        except BaseException as error:
            named = describe_unexpected(error, rank=order.participant.rank, doing="copying what is saved")
            if not isinstance(error, CheckpointError):
                say(_log.exception, "rank %d failed while copying what is saved", order.participant.rank)
            saving.set_taken()
            if not handed_over:
                saving.give_up(named)
            else:
                with suppress(CheckpointError):  # it has ended, and with it the save
                    saving.tell(broken=named.to_wire())
        else:
            saving.set_taken()

    def _announce(
        self, saving: SaveHandle, writer: CheckpointProcess, order: Order, snapshot: Snapshot, copies: Copies
    ) -> None:
        """Hand the save over to the checkpoint process, with a new layout or staging memory if these have changed."""
        with copies.reading():
            write_plan, descriptor = snapshot.prepared.read(), None
        message = {
            "begin": True,
            "save": saving.number,
            "participant": order.participant.to_wire(),
            "target": order.directory,
            "working": order.working,
            "settings": asdict(order.settings),
            "adds_files": order.add_files is not None,
            "follows_up": order.after_commit is not None,
            "phases": order.phases.to_wire(),
            "values": snapshot.values,
            "planned": wire.to_wire(write_plan),
        }
        needed = length_of(write_plan.blocks[number].nbytes for number in write_plan.chunks)
        capacity, staging = capacity_for(needed, order.settings.staging_limit), writer.staging
        if (layout := wire.layout_of(write_plan)) != writer.layout:
            message["layout"] = wire.layout_to_wire(layout)
        if staging is None or staging.capacity != capacity:
            writer.drop_staging()
            staging = Staging.create(capacity)
            message["capacity"], descriptor = capacity, staging.descriptor
            if not copies.prepare(staging):
                say(_log.warning, "staging memory cannot be page-locked, so copies from the device take longer")
        try:
            writer.send(message, descriptor, begins=saving)
        except BaseException:
            if staging is not writer.staging:
                staging.close()
            raise
        writer.layout, writer.staging = layout, staging
        saving.capacity, saving.send = capacity, writer.send

    def _fill(self, saving: SaveHandle, staging: Staging | None, own: Prepared, choice: str, copies: Copies) -> None:
        """Copy the chunks that the checkpoint process writes, and hash the blocks that it only compares."""
        assert staging is not None
        filling = Filling(staging, saving.number, saving, copies)
        with torch.no_grad():
            for number in own.write_plan.chunks:
                filling.add(own.shards[number].elements().detach(), partial(own.check, number))
            filling.end()
        with torch.no_grad(), copies.reading():
            compared = own.write_plan.compared(choice)
            digests = list(zip(compared, own.elements.digests(compared), strict=True))
        saving.tell(digests=digests)


def _answer(ask: Message, saving: SaveHandle, order: Order) -> None:
    """Call `add_files` or `after_commit` for the checkpoint process, and send it the error that was raised, if any."""
    answer = None
    try:
        if ask["ask"] == "add_files" and order.add_files is not None:
            order.add_files(Path(ask["directory"]))
        if ask["ask"] == "after_commit" and order.after_commit is not None:
            order.after_commit()
    except BaseException as error:  # SystemExit, too: no rank may go on as if it were saved
        if not isinstance(error, CheckpointError):
            say(_log.exception, "%s failed for %s", ask["ask"], order.directory)
        answer = describe_unexpected(error, rank=order.participant.rank, doing=f"calling {ask['ask']}").to_wire()
    with suppress(CheckpointError):  # the process has ended, and with it the save
        saving.tell(answer=answer)


def _vouch(writer: CheckpointProcess, participant: Participant) -> None:
    """Give heartbeats in place of a checkpoint process until it has started, which may take long."""
    while not writer.spoke.wait(participant.time_limit / _HEARTBEATS):
        try:
            participant.vouch()
        except CheckpointError as error:  # the meetings of the save raise it
            say(_log.info, "no heartbeat can be given while the checkpoint process starts: %s", error)
            return


_async_saves = AsyncSaves()


def async_saves() -> AsyncSaves:
    """The asynchronous saves of this process."""
    return _async_saves


@cache
def _hook() -> None:
    """Register the hooks of this process: every optimizer's step waits for the snapshot, and the exit for the save.

    Weights and optimizer state change in an optimizer's step only.  The hook is for all optimizers: a save without
    optimizer state still saves weights.
    """
    register_optimizer_step_pre_hook(_before_step)
    atexit.register(lambda: _async_saves.stop())
    os.register_at_fork(after_in_child=_forget)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _async_saves.wait_until_taken()


def _forget() -> None:
    global _async_saves
    _async_saves.forget()
    _async_saves = AsyncSaves()

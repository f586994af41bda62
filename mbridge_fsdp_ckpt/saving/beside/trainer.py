"""Saves beside the training, as the trainer begins, awaits and ends them.  One at a time, in the order of the calls."""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mbridge_fsdp_ckpt.agree.elsewhere import Seat
from mbridge_fsdp_ckpt.agree.incarnation import base_of, default_store
from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.errors import CheckpointError, SaveAbandonedError
from mbridge_fsdp_ckpt.saving.beside import wire
from mbridge_fsdp_ckpt.saving.beside.channel import Message
from mbridge_fsdp_ckpt.saving.beside.filling import Copies, Filling, OnHost, OnStream
from mbridge_fsdp_ckpt.saving.beside.handle import Saving
from mbridge_fsdp_ckpt.saving.beside.memory import Staging, length_of, slots_for
from mbridge_fsdp_ckpt.saving.beside.order import Order, Snapshot, Still
from mbridge_fsdp_ckpt.saving.beside.process import WriterProcess
from mbridge_fsdp_ckpt.saving.beside.worker import Worker
from mbridge_fsdp_ckpt.saving.snapshot import Prepared
from mbridge_fsdp_ckpt.settings import Settings

_SIGNS = 8  # within the time limit, in place of a writer that starts
_log = logging.getLogger(__name__)


class Trainer:
    """This process, as far as it has saves going on."""

    def __init__(self) -> None:
        self._writer: WriterProcess | None = None
        self._saving: Saving | None = None
        self._stager: Worker | None = None
        self._asked: Worker | None = None
        self._saves = 0
        self._beginning = threading.Lock()  # a save, or the end: staging memory is given back before, or not at all
        self._served: dist.Store | None = None  # it serves for as long as somebody refers to it

    def begin(self, order: Order) -> Saving:
        """Begin a save; the one before has ended.  What has not been read when it returns, only a step changes."""
        _hook_optimizers()
        with self._beginning:
            self._saves += 1
        self._served = base_of(default_store()) if order.seat.world_size > 1 else None
        saving = Saving(order.directory, order.seat, order.add_files, order.after_commit, self._answer)
        still = order.held_still()
        on_device = still.message(lambda own: own.seen.tensors.is_on_device) is True
        copies: Copies = OnStream() if on_device else OnHost()
        # before the call returns, like all threads: none can begin once the interpreter ends, which waits for the save
        writer = Outcome.of(
            partial(self._writer_for, order.settings, order.seat), order.seat.rank, "starting the writer"
        )
        self._saving = saving
        if order.seat.rank == 0 and (order.add_files is not None or order.after_commit is not None):
            self._asked = Worker.after(self._asked, "asked by the writer")
            self._asked.do(saving.serve)
        self._stager = Worker.after(self._stager, "staging")
        saving.stalled += order.phases.elapsed
        self._stager.do(partial(self._stage, saving, order, writer, still, copies))
        if still.message(lambda own: own.seen.may_be_replayed) is True:  # nothing would tell of such a step
            saving.wait_until_taken()
        return saving

    def wait_until_taken(self) -> None:
        """Before tensors change: let the snapshot come to its end."""
        if self._saving is not None:
            self._saving.wait_until_taken()

    def skips(self, seat: Seat, settings: Settings) -> bool:
        """Whether a save is left out, because the one before goes on: where the first rank finds it so, on all."""
        if settings.when_busy != "skip":
            return False
        busy = self._saving is not None and not self._saving.done
        skipped = seat.rank_0_says("busy" if busy else "free") == "busy"
        if skipped and seat.rank == 0:
            _log.warning("skipped: %s; the save before it goes on", seat.purpose)
        return skipped

    def settle(self) -> None:
        """Wait for the save before, if there is one.

        Raises:
            CheckpointError: It failed, and nobody has been told.  The same on every rank.
        """
        saving = self._saving
        if saving is None:
            return
        saving.wait()
        self._saving = None
        if saving.error is not None and not saving.raised:
            saving.result()

    def release(self, *, wait: bool = True) -> None:
        """Give staging memory back, once a save that goes on has been written; see `checkpoint.release_staging`."""
        give_back = partial(self._give_back, self._saving, self._saves)
        if wait or self._saving is None or self._saving.done:
            give_back()
        else:
            threading.Thread(target=give_back, name="giving back", daemon=True).start()

    def stop(self) -> None:
        """Wait for the save that goes on, whatever it comes to, and let the writer end."""
        if self._saving is not None:
            self._saving.wait()
        self._saving = self._served = None
        with self._beginning:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()

    def hear(self, message: Message) -> None:
        """See `Listener`."""
        if self._saving is not None:
            self._saving.hear(message)

    def writer_ended(self, writer: WriterProcess, how: str) -> None:
        """See `Listener`.  One that was replaced has nothing to do with the save that goes on."""
        if self._saving is not None and writer is self._writer:
            self._saving.writer_ended(how)

    def _give_back(self, last: Saving | None, saves: int) -> None:
        """Give staging memory back once the last of so many saves has ended, unless another has begun by then."""
        if last is not None:
            last.wait()
        with self._beginning:
            writer = self._writer
            if self._saves != saves or writer is None or writer.staging is None:
                return
            with suppress(SaveAbandonedError):  # with a writer that has ended its share has gone
                writer.send({"release": True})
            writer.drop_staging()

    def _answer(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.send(message)

    def _stage(
        self,
        saving: Saving,
        order: Order,
        writer: Outcome[WriterProcess],
        still: Outcome[Still],
        copies: Copies,
    ) -> None:
        """Plan and copy.  Of the thread that does."""
        rank, doing = order.seat.rank, "beginning to save beside the training"
        try:
            with copies.reading():  # of state in 8 or 16 bits an optimizer makes what is saved
                snapshot = order.planned(still)
            begin = writer.then(lambda writer: self._announce(writer, order, snapshot, copies), rank, doing)
            if isinstance(begin.brought, CheckpointError):
                saving.give_up(begin.brought)
            elif not begin.brought.lives:  # since before this save was there to hear of it, perhaps
                saving.writer_ended(begin.brought.how_ended)
            elif not isinstance(snapshot.brought, CheckpointError):
                listener, own = begin.brought, snapshot.brought.prepared
                fill = partial(self._fill, listener, saving, own, order.settings.replicas, copies)
                filled = Outcome.of(fill, rank, "copying what is saved")
                if isinstance(filled.brought, CheckpointError):
                    listener.send({"broken": filled.brought.to_wire(), "save": self._saves})
        except SaveAbandonedError as error:
            _log.debug("the writer has ended, which who listens to it knows: %s", error)
        finally:
            saving.set_taken()

    def _writer_for(self, settings: Settings, seat: Seat) -> WriterProcess:
        if self._writer is None or not self._writer.lives:
            if self._writer is not None:
                self._writer.drop_staging()
            self._writer = WriterProcess(self, settings.storage_limit, settings.time_limit)
            if self._served is not None:
                vouching = partial(_vouch, self._writer, seat)
                threading.Thread(target=vouching, name="writer starts", daemon=True).start()
        return self._writer

    def _announce(
        self, writer: WriterProcess, order: Order, snapshot: Outcome[Snapshot], copies: Copies
    ) -> WriterProcess:
        """Tell the writer what is to come, numbers of tensors among it."""
        brought = snapshot.brought
        message = {
            "save": self._saves,
            "seat": order.seat.to_wire(),
            "target": order.directory,
            "working": order.working,
            "settings": asdict(order.settings),
            "adds_files": order.add_files is not None,
            "follows_up": order.after_commit is not None,
            "phases": order.phases.to_wire(),
        }
        if isinstance(brought, CheckpointError):
            writer.send(message | {"failed": brought.to_wire()})
            return writer
        with copies.reading():
            outgoing, descriptor = brought.prepared.read(), None
        needed = length_of(outgoing.blocks[number].nbytes for number in outgoing.chunks)
        slots = slots_for(needed, order.settings.staging_limit)
        if writer.staging is None or writer.staging.slots != slots:
            descriptor = self._replace_staging(writer, slots, copies).descriptor
            message["slots"] = slots
        if (layout := wire.layout_of(outgoing)) != writer.layout:
            writer.layout = layout
            message["layout"] = wire.layout_to_wire(layout)
        writer.send(message | {"values": brought.values, "planned": wire.to_wire(outgoing)}, descriptor)
        return writer

    def _replace_staging(self, writer: WriterProcess, slots: int, copies: Copies) -> Staging:
        writer.drop_staging()
        writer.staging = staging = Staging.create(slots)
        if not copies.prepare(staging):
            _log.warning("staging memory cannot be page-locked: copies from the device take longer")
        return staging

    def _fill(self, writer: WriterProcess, saving: Saving, own: Prepared, choice: str, copies: Copies) -> None:
        """Copy what the writer writes, and hash what it compares alone."""
        staging = writer.staging
        assert staging is not None
        filling = Filling(staging, self._saves, _Consumer(writer, saving, staging.slots, self._saves), copies)
        with torch.no_grad():
            for number in own.outgoing.chunks:
                filling.add(own.holdings[number].elements().detach(), partial(own.check, number))
            filling.end()
        with torch.no_grad(), copies.reading():
            compared = own.outgoing.compared(choice)
            digests = list(zip(compared, own.elements.digests(compared), strict=True))
        writer.send({"digests": digests, "save": self._saves})


@dataclass(frozen=True, slots=True)
class _Consumer:
    """See `filling.Consumer`: the writer."""

    writer: WriterProcess
    saving: Saving
    slots: int
    save: int

    def filled(self, portions: int) -> None:
        """See `filling.Consumer`."""
        self.writer.send({"filled": portions, "save": self.save})

    def wait_for_slot(self, portion: int) -> None:
        """See `filling.Consumer`."""
        self.saving.wait_for_slot(portion, self.slots)


def _vouch(writer: WriterProcess, seat: Seat) -> None:
    """While a writer starts, give signs of life in its place: that may take long where files are slow."""
    while not writer.spoke.wait(seat.time_limit / _SIGNS):
        try:
            seat.vouch()
        except CheckpointError as error:  # who meets there will say so
            _log.info("no sign of life can be given for the writer: %s", error)
            return


_trainer = Trainer()
_hooked = False


def trainer() -> Trainer:
    """This process's."""
    return _trainer


def _hook_optimizers() -> None:
    """Weights and optimizer state change in an optimizer's step and nowhere else: it waits for the snapshot.

    Whichever optimizer it is: a save without optimizer state is one of weights all the same.
    """
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)
        atexit.register(_trainer.stop)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _trainer.wait_until_taken()

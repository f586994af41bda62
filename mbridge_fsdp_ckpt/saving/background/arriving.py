# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The elements that a training process stages, read by its checkpoint process: an implementation of `Elements`."""

from __future__ import annotations

import threading
from collections.abc import Buffer, Callable, Iterable, Iterator, Sequence

from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, SaveAbandonedError
from mbridge_fsdp_ckpt.saving.background.channel import Message, slices
from mbridge_fsdp_ckpt.saving.background.memory import PORTION, Staging, aligned
from mbridge_fsdp_ckpt.saving.write_plan import WritePlan


class Arriving:
    """Elements that arrive in staging memory while they are written.

    Args:
        write_plan: The write plan of the save.
        staging: The staging memory.
        save: The number of the save.
        freed: Called with the number of portions that have been read so far.
        limit: Seconds that may pass without anything arriving.
    """

    def __init__(
        self, write_plan: WritePlan, staging: Staging, save: int, freed: Callable[[int], None], limit: float
    ) -> None:
        self._write_plan, self._staging, self._save, self._freed, self._limit = write_plan, staging, save, freed, limit
        self._position, self._read = 0, 0
        self._changed = threading.Condition()
        self._filled = 0
        self._digests: dict[int, int] = {}
        self._error: CheckpointError | None = None

    def hear(self, message: Message) -> None:
        """Take a message: the number of filled portions, hashes of blocks that other ranks write, or an error.

        Called by another thread.
        """
        with self._changed:
            self._filled = message.get("filled", self._filled)
            self._digests.update(message.get("digests", ()))
            if "broken" in message and self._error is None:
                self._error = CheckpointError.from_wire(message["broken"])
            self._changed.notify_all()

    def each(self, numbers: Sequence[int]) -> Iterator[Iterable[Buffer]]:
        """See `Elements`.

        Raises:
            CheckpointError: The training process failed with this error.
            SaveAbandonedError: Nothing has arrived within the limit.
            InternalError: A portion belongs to another save.
        """
        return map(self._pieces, numbers)

    def _pieces(self, number: int) -> Iterator[Buffer]:
        self._position, left = aligned(self._position), self._write_plan.blocks[number].nbytes
        while left:
            portion, offset = divmod(self._position, PORTION)
            self._free(portion)
            self._await(lambda portion=portion: self._filled > portion)  # type: ignore[misc]  # asked at once
            self._check(portion, number)
            start, count = self._staging.place(portion) + offset, min(left, PORTION - offset)
            yield self._staging.bytes[start : start + count]
            self._position, left = self._position + count, left - count

    def digests(self, numbers: Sequence[int]) -> Iterator[int]:
        """See `Elements`."""
        for number in numbers:
            self._await(lambda number=number: number in self._digests)  # type: ignore[misc]  # asked at once
            yield self._digests[number]

    def _free(self, portion: int) -> None:
        """Report that all portions before this one have been read."""
        if portion > self._read:
            self._read = portion
            self._freed(portion)

    def _check(self, portion: int, number: int) -> None:
        if not self._staging.has(portion, self._save):
            raise InternalError(
                expected=f"portion {portion} of save {self._save} in staging memory",
                found="a portion of another save",
                remedy="Nothing was committed. Report it.",
                key=self._write_plan.blocks[number].key,
            )

    def _await(self, there: Callable[[], bool]) -> None:
        """Wait for the training process for as long as portions arrive within the limit."""
        with self._changed:
            seen, waits = self._filled, slices(self._limit)
            while not there():
                if self._error is not None:
                    raise self._error
                if self._filled > seen:
                    seen, waits = self._filled, slices(self._limit)
                pause = next(waits, None)
                if pause is None:
                    raise SaveAbandonedError(
                        expected="the training process to copy what it saves before the optimizer's next step",
                        found=f"no further portion within {self._limit:g} s",
                        remedy="Check whether the training process is stopped or stuck. Nothing was committed.",
                    )
                self._changed.wait(pause)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Copying live tensors into staging memory, while training continues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from mbridge_fsdp_ckpt.saving.background.memory import PORTION, Staging, aligned


class Consumer(Protocol):
    """Who reads what is staged."""

    def filled(self, portions: int) -> None:
        """So many portions are there."""

    def wait_for_slot(self, portion: int) -> None:
        """Return once this portion's slot may be written."""


class Copies(Protocol):
    """How a device's bytes reach the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy."""

    def settle(self) -> None:
        """Return once all copies have ended."""

    def reading(self) -> AbstractContextManager[Any]:
        """Around what reads tensors by itself."""

    def prepare(self, staging: Staging) -> bool:
        """Make memory ready to be copied into; whether that worked."""


class Filling:
    """One save's stream on its way into staging memory.

    Args:
        staging: The memory.
        save: The number of the save.
        consumer: The receiver, which reads the staging memory.
        copies: How it gets there.
    """

    def __init__(self, staging: Staging, save: int, consumer: Consumer, copies: Copies) -> None:
        self._staging, self._save, self._consumer, self._copies = staging, save, consumer, copies
        self._memory = torch.from_numpy(staging.bytes)
        self._position, self._entered, self._complete = 0, 0, 0
        self._unchecked: list[Callable[[], None]] = []

    def add(self, elements: torch.Tensor, check: Callable[[], None]) -> None:
        """Append one chunk.

        Args:
            elements: The chunk's elements, flat, on any device.
            check: Called once they are copied, and before anybody may rely on it; raises where they had changed.
        """
        self._advance(aligned(self._position))
        size, done, count = elements.element_size(), 0, elements.numel()
        while done < count:
            portion, offset = divmod(self._position, PORTION)
            self._enter(portion)
            fits = min(count - done, (PORTION - offset) // size)
            start = self._staging.place(portion) + offset
            target = self._memory[start : start + fits * size].view(elements.dtype)
            self._copies.copy(target, elements[done : done + fits])
            done += fits
            self._advance(self._position + fits * size)
        self._unchecked.append(check)

    def end(self) -> None:
        """Hand over the last portion, which may not be full."""
        if self._position > self._complete * PORTION:
            self._end_portion(self._complete)
        self._check()

    def _enter(self, portion: int) -> None:
        if portion >= self._entered:
            self._consumer.wait_for_slot(portion)
            self._entered = portion + 1

    def _advance(self, position: int) -> None:
        self._position = position
        while position >= (self._complete + 1) * PORTION:
            self._end_portion(self._complete)

    def _end_portion(self, portion: int) -> None:
        self._copies.settle()
        self._check()
        self._staging.stamp(portion, self._save)
        self._complete = portion + 1
        self._consumer.filled(self._complete)

    def _check(self) -> None:
        """Check all chunks whose last byte has been copied."""
        for check in self._unchecked:
            check()
        self._unchecked.clear()


class OnHost:
    """See `Copies`: tensors of the host, copied at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Copies`."""
        target.copy_(source)

    def settle(self) -> None:
        """See `Copies`."""

    def reading(self) -> AbstractContextManager[Any]:
        """See `Copies`."""
        return nullcontext()

    def prepare(self, staging: Staging) -> bool:
        """See `Copies`: there is nothing to do."""
        return True


class OnStream:
    """See `Copies`: tensors of a device, on a stream of their own, which begins after what the caller's has to do.

    Made by the thread that trains: what that has asked of its stream by now is part of the save.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Copies`."""
        with self.reading():
            target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """See `Copies`."""
        self._stream.synchronize()

    def reading(self) -> AbstractContextManager[Any]:
        """See `Copies`: after what the training stream had to do at the save, and not after what it got since."""
        return torch.cuda.stream(self._stream)

    def prepare(self, staging: Staging) -> bool:
        """See `Copies`: page-locked, a device copies into it by itself.

        CUDA asks for it on the current device, which is the first one in a thread that has chosen none: a rank must
        not take memory of another rank's device for that.
        """
        pointer, size = staging.bytes.ctypes.data, staging.bytes.nbytes
        runtime: Any = torch.cuda.cudart()

        def undo() -> None:
            with torch.cuda.device(self._device):
                runtime.cudaHostUnregister(pointer)

        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(pointer, size, 0)):
                return False
        staging.before_close = undo
        return True

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which device an asynchronous save uses: this rank's, in whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from mbridge_fsdp_ckpt.saving.background.filling import OnStream
from mbridge_fsdp_ckpt.saving.background.memory import Staging

OWN = 3
LIMIT_S = 10.0


class _Current(threading.local):
    """CUDA's current device: every thread has its own, and begins with 0."""

    device = 0


@dataclass
class _Cuda:
    """What is asked of torch.cuda, and of which device."""

    current: _Current = field(default_factory=_Current)
    asked: list[tuple[str, int]] = field(default_factory=list)

    class Stream:
        """A stream of a device."""

        def __init__(self, device: int) -> None:
            self.device = device

        def wait_stream(self, _other: object) -> None:
            """Nothing is running."""

    def current_device(self) -> int:
        return self.current.device

    def current_stream(self, device: int) -> _Cuda.Stream:
        return self.Stream(device)

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current.device = self.current.device, number
        yield
        self.current.device = before

    def cudart(self) -> _Cuda:
        return self

    def cudaHostRegister(self, _pointer: int, _size: int, _flags: int) -> int:  # noqa: N802
        self.asked.append(("register", self.current.device))
        return 0

    def cudaHostUnregister(self, _pointer: int) -> int:  # noqa: N802
        self.asked.append(("unregister", self.current.device))
        return 0


def _in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(LIMIT_S)


def test_memory_is_locked_and_unlocked_for_the_device_of_the_thread_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, staging = _Cuda(), Staging.create(1)
    for name in ("Stream", "current_device", "current_stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.current.device = OWN
    copies = OnStream()

    _in_a_thread(lambda: copies.prepare(staging))
    _in_a_thread(staging.close)

    # the context of another device would take hundreds of MiB of it, from every rank
    assert cuda.asked == [("register", OWN), ("unregister", OWN)]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The trainer's side of its writer: whoever has something to say to it does not wait until it listens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.errors import SaveAbandonedError
from mbridge_fsdp_ckpt.saving.background.checkpoint_process import CheckpointProcess
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle

LIMIT_S = 60.0
LONG = {"word": "x" * (1 << 22)}
"""More than a socket holds until somebody reads."""


def saving(number: int) -> SaveHandle:
    return SaveHandle(number, "iter_0000001", Participant("save", 0, 1, LIMIT_S, LIMIT_S))


@pytest.fixture
def stopped() -> Iterator[CheckpointProcess]:
    """A process that reads nothing, as one that has only begun to start."""
    writer = CheckpointProcess(LIMIT_S, LIMIT_S)
    os.kill(writer.pid, signal.SIGSTOP)
    yield writer
    if writer.error is None:
        os.kill(writer.pid, signal.SIGKILL)
    assert writer.spoke.wait(LIMIT_S)
    writer.stop()


def test_what_is_said_waits_for_nobody(stopped: CheckpointProcess) -> None:
    """The first save's plan of many tensors waited for the writer to start, and the optimizer's step for both."""
    writer = stopped

    def say() -> None:
        for _ in range(3):
            writer.send(LONG)

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(LIMIT_S / 6)
    assert not saying.is_alive()


def test_the_end_of_a_process_ends_the_save_that_it_was_handed_last(stopped: CheckpointProcess) -> None:
    one, two = saving(1), saving(2)
    stopped.send(LONG, begins=one)
    stopped.send(LONG, begins=two)
    os.kill(stopped.pid, signal.SIGKILL)
    two.set_taken()
    two.wait()
    assert two.error is not None
    assert "exit status -9" in two.error.found
    assert one.error is None
    with pytest.raises(SaveAbandonedError, match="exit status -9"):
        stopped.send({"word": "more"})


def test_what_cannot_be_sent_is_said_to_who_sends_it(stopped: CheckpointProcess) -> None:
    one = saving(1)
    with pytest.raises(TypeError, match="set"):
        stopped.send({"word": {1, 2}}, begins=one)
    assert stopped._saving is None

"""The trainer's side of its writer: it starts the process, hears it, and notices when it has ended or gone silent."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Protocol

from mbridge_fsdp_ckpt.errors import SaveAbandonedError
from mbridge_fsdp_ckpt.saving.beside import wire
from mbridge_fsdp_ckpt.saving.beside.channel import Channel, Message
from mbridge_fsdp_ckpt.saving.beside.memory import Staging

_log = logging.getLogger(__name__)
_LEAVE_S = 10.0  # seconds that a writer with nothing to do has to end


def pulse_for(limit: float) -> float:
    """Seconds between two signs of life of a writer, some of which may be late, and between looks at them.

    Args:
        limit: Seconds without one after which it is killed.
    """
    return min(1.0, limit / 8)


class Listener(Protocol):
    """Who waits for what a writer has to say."""

    def hear(self, message: Message) -> None:
        """A message.  Of another thread."""

    def writer_ended(self, writer: WriterProcess, how: str) -> None:
        """Nothing more will be said.  Of another thread."""


class WriterProcess:
    """The writer of this rank.

    Args:
        listener: Hears it.
        start_limit: Seconds that it may take until it says something.
        silence_limit: Seconds without a sign of life after which it is killed.
    """

    def __init__(self, listener: Listener, start_limit: float, silence_limit: float) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}", str(other.fileno()), str(pulse_for(silence_limit))],
                pass_fds=[other.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's
            )
        self._channel, self._listener, self._silence_limit = Channel(own), listener, silence_limit
        self._ended, self._killed_for = threading.Event(), ""
        self.spoke = threading.Event()
        """Whether it has said something, or has ended without."""
        self._patient_until = time.monotonic() + start_limit
        self.how_ended = ""
        """In words, once it has."""
        self.staging: Staging | None = None
        """The memory that it knows of."""
        self.layout: wire.Layout | None = None
        """The layout that it knows of."""
        self._outbox: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="telling the writer", daemon=True)
        self._teller.start()
        threading.Thread(target=self._listen, name="hearing the writer", daemon=True).start()
        threading.Thread(target=self._watch, name="watching the writer", daemon=True).start()

    @property
    def lives(self) -> bool:
        """Whether it can be given something to do."""
        return not self._ended.is_set()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Say something to it, and wait for nothing: while it starts it hears nothing, and tensors wait to be copied.

        Raises:
            SaveAbandonedError: It has ended.
        """
        if self._ended.is_set():
            raise ended(self.how_ended)
        self._outbox.put((message, None if descriptor is None else os.dup(descriptor)))

    def drop_staging(self) -> None:
        """Give the trainer's share of the memory back, if there is any."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def stop(self) -> None:
        """Let it end, and give the memory back; what it is doing is given up."""
        self._outbox.put(None)
        self._teller.join(_LEAVE_S)
        self._channel.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.drop_staging()

    def _tell(self) -> None:
        while (item := self._outbox.get()) is not None:
            message, descriptor = item
            try:
                self._channel.send(message, descriptor)
            except OSError as error:
                _log.debug("the writer has ended, which who listens to it knows: %s", error)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._patient_until = time.monotonic() + self._silence_limit
            self.spoke.set()
            if "log" in message:
                level, name, text = message["log"]
                logging.getLogger(name).log(level, "%s", text)
            elif "alive" not in message:
                self._listener.hear(message)
        code = self._process.wait()
        self.how_ended = self._killed_for or f"it ended with exit status {code}"
        self._ended.set()
        self._outbox.put(None)
        self.spoke.set()
        self._listener.writer_ended(self, self.how_ended)

    def _watch(self) -> None:
        """A writer that is stopped, or stuck in its storage, is killed: nobody waits for it for good."""
        while not self._ended.wait(pulse_for(self._silence_limit)):
            if time.monotonic() > self._patient_until:
                self._killed_for = f"no sign of life within {self._silence_limit:g} s"
                self._process.kill()
                return


def ended(how: str) -> SaveAbandonedError:
    """The error for a writer that is no more."""
    return SaveAbandonedError(
        expected="the process that writes this rank's save to live until that has ended",
        found=how,
        remedy="Was it killed, say for memory? A resume finds the last whole checkpoint. The next save starts another.",
    )

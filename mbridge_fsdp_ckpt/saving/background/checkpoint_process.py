# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The training process's side of its checkpoint process: starts it, talks to it, and notices its end or silence."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, brief
from mbridge_fsdp_ckpt.remedies import VARIABLE, door
from mbridge_fsdp_ckpt.saving.background import wire
from mbridge_fsdp_ckpt.saving.background.channel import Channel, Message, encoded, pulse_for
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle, ended, say
from mbridge_fsdp_ckpt.saving.background.memory import Staging

_log = logging.getLogger(__name__)
_LEAVE_S = 10.0  # seconds that a process with nothing to do has to end
_PROGRAM = f"import sys; sys.path[:] = sys.argv[4:]; from {__package__}.checkpoint_main import main; main()"


class CheckpointProcess:
    """The checkpoint process of this rank.

    Args:
        start_limit: Seconds that it may take until it says something.
        silence_limit: Seconds without a heartbeat after which it is killed.

    Raises:
        OSError, RuntimeError: The system has no process, or no thread.
    """

    def __init__(self, start_limit: float, silence_limit: float) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pulse, self._limits = pulse_for(silence_limit), (start_limit, silence_limit)
        self._channel, self._lock = Channel(own), threading.Lock()
        arguments = str(other.fileno()), str(self._pulse), str(os.getpid())
        with other, _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments, *_path()],
                pass_fds=[other.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", VARIABLE: door()},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._saving: SaveHandle | None = None
        self.error: CheckpointError | None = None
        """Why it can be given nothing more to do, once it has ended, or is about to."""
        self.spoke = threading.Event()
        """Whether it has said something, or has ended without."""
        self.staging: Staging | None = None
        """The memory that it knows of."""
        self.layout: wire.Layout | None = None
        """The layout that it knows of."""
        self._outbox: queue.SimpleQueue[tuple[bytes, int | None] | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="telling the checkpoint process", daemon=True)
        try:
            self._teller.start()
            threading.Thread(target=self._listen, name="hearing the checkpoint process", daemon=True).start()
        except RuntimeError:
            self._outbox.put(None)
            self._process.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def send(self, message: Message, descriptor: int | None = None, begins: SaveHandle | None = None) -> None:
        """Say something to it, and wait for nothing: while it starts it hears nothing, and tensors wait to be copied.

        Args:
            message: What.
            descriptor: Sent with it; open until the save has ended.
            begins: The save that is handed over by it: its messages are heard from now on, and its end ends that.

        Raises:
            CheckpointError: It has ended.
            TypeError: The message cannot be sent.
        """
        text = encoded(message)
        with self._lock:
            if self.error is not None:
                raise CheckpointError.from_wire(self.error.to_wire())
            self._saving = begins or self._saving
            self._outbox.put((text, descriptor))

    def drop_staging(self) -> None:
        """Give the training process's share of the memory back, if there is any."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def kill(self, error: CheckpointError) -> None:
        """End it at once; whatever it was doing ends by this error."""
        with self._lock:  # the next save begins with another one, though this has not gone yet
            self.error = self.error or error
        self._process.kill()

    def stop(self) -> None:
        """Let it end, and give the memory back; what it is doing is given up."""
        self._outbox.put(None)
        self._teller.join(_LEAVE_S)
        self._channel.close()
        for _ in range(2):  # one that is stuck in its storage does not even hear that it is killed
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
                break
            self._process.kill()
        self.drop_staging()

    def forget(self) -> None:
        """In a forked child, which has none: close what was inherited, unheard by the process."""
        self._channel.forget()
        self._process.returncode = 0  # nobody's child here
        if self.staging is not None:
            self.staging.forget()

    def _tell(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._channel.send(*item)
        except ConnectionError as error:  # who listens hears of its end
            say(_log.debug, "the checkpoint process has ended: %s", error)
        except BaseException as error:
            self.kill(ended(f"the thread that tells it failed: {brief(error)}"))

    def _listen(self) -> None:
        """Of the thread that listens: however that ends, the process and its save end."""
        try:
            error = self._hear()
        except BaseException as unexpected:
            error = ended(f"the thread that hears it failed: {brief(unexpected)}")
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._channel.close()
        with self._lock:
            self.error = self.error or error
            saving = self._saving
        self._outbox.put(None)
        self.spoke.set()
        if saving is not None:
            saving.give_up(self.error)

    def _hear(self) -> CheckpointError:
        """Pass on what it says; returns why it has ended.

        Silence is counted in waits that found nothing to read: a process that was stopped, or whose interpreter was
        busy, first reads what has come meanwhile.
        """
        silent = 0
        for message in self._channel.messages(self._pulse):
            silent = silent + 1 if message is None else 0
            if message is not None:
                if "hello" in message and (error := _differs(message["hello"])) is not None:
                    return error
                self.spoke.set()
                self._pass_on(message)
            elif silent * self._pulse > (limit := self._limits[self.spoke.is_set()]):
                return ended(f"no heartbeat within {limit:g} s")
            elif self._process.poll() is not None:  # a child of this process may hold its end of the channel open
                break
        try:
            return ended(f"it ended with exit status {self._process.wait(_LEAVE_S)}")
        except subprocess.TimeoutExpired:
            return ended("it hung up")

    def _pass_on(self, message: Message) -> None:
        saving = self._saving
        if "log" in message:
            level, name, text = message["log"]
            say(logging.getLogger(name).log, level, "%s", text)
        elif "save" not in message:
            return
        elif saving is not None and saving.number == message["save"]:
            saving.hear(message)
        else:
            say(_log.debug, "of a save that has ended: %s", message)


def identity() -> list[str]:
    """Which installation of this package a process runs: its version and its file."""
    package = sys.modules[__name__.partition(".")[0]]
    return [str(package.__version__), str(Path(__file__).resolve())]


def _differs(other: list[str]) -> ConfigurationError | None:
    if other == identity():
        return None
    return ConfigurationError(
        expected=f"the checkpoint process to run the package of its training process, {' in '.join(identity())}",
        found=" in ".join(other),
        remedy="Has it been installed anew, or sys.path changed, since the job began? Restart the job.",
    )


def _path() -> list[str]:
    """Where this process looks for modules, in full; what is relative to a directory that was removed is left out."""
    found = []
    for entry in sys.path:
        with suppress(FileNotFoundError):
            found.append(str(Path(entry).absolute()))
    return found


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A block in which processes start that no signal ends or wakes, but for SIGKILL: they go by their channel alone.

    Schedulers send signals to all processes of a job.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

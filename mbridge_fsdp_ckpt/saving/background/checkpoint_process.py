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
from mbridge_fsdp_ckpt.remedies import VARIABLE, frontend
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
        start_limit: Seconds that the process may take until its first message.
        silence_limit: Seconds without a heartbeat after which the process is killed.

    Raises:
        OSError, RuntimeError: The system cannot start a process, or a thread.
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
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", VARIABLE: frontend()},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._saving: SaveHandle | None = None
        self.error: CheckpointError | None = None
        """The error with which the process has ended, or is about to; None while it takes messages."""
        self.spoke = threading.Event()
        """Set once the process has sent a message, or has ended."""
        self.staging: Staging | None = None
        """The staging memory that the process has been given."""
        self.layout: wire.Layout | None = None
        """The layout that the process has been given."""
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
        """The id of the process."""
        return self._process.pid

    def send(self, message: Message, descriptor: int | None = None, begins: SaveHandle | None = None) -> None:
        """Queue a message to the process, and return at once, also while the process still starts.

        Args:
            message: The message.
            descriptor: A file descriptor to send with it; it must stay open until the save has ended.
            begins: The save that the message hands over.  From now on it gets the process's messages, and fails if the
                process ends.

        Raises:
            CheckpointError: The process has ended.
            TypeError: The message cannot be sent.
        """
        text = encoded(message)
        with self._lock:
            if self.error is not None:
                raise CheckpointError.from_wire(self.error.to_wire())
            self._saving = begins or self._saving
            self._outbox.put((text, descriptor))

    def drop_staging(self) -> None:
        """Free the training process's mapping of the staging memory, if there is one."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def kill(self, error: CheckpointError) -> None:
        """Kill the process.  A save in progress fails with this error."""
        with self._lock:  # the next save begins with another one, though this has not gone yet
            self.error = self.error or error
        self._process.kill()

    def stop(self) -> None:
        """End the process and free the staging memory.  A save in progress is given up."""
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
        """Close what a forked child has inherited, without a message to the process."""
        self._channel.forget()
        self._process.returncode = 0  # nobody's child here
        if self.staging is not None:
            self.staging.forget()

    def _tell(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._channel.send(*item)
        except ConnectionError as error:  # the thread that listens reports its end
            say(_log.debug, "the checkpoint process has ended: %s", error)
        except BaseException as error:
            self.kill(ended(f"the thread that sends messages to it failed: {brief(error)}"))

    def _listen(self) -> None:
        """Read the process's messages.  Runs in a thread; when it returns, the process and its save have ended."""
        try:
            error = self._hear()
        except BaseException as unexpected:
            error = ended(f"the thread that reads its messages failed: {brief(unexpected)}")
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
        """Pass on the process's messages; returns the error that says why the process has ended.

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
            return ended(f"a process that ended with exit status {self._process.wait(_LEAVE_S)}")
        except subprocess.TimeoutExpired:
            return ended("a process that closed its connection and did not exit")

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
            say(_log.debug, "message about a save that has ended: %s", message)


def identity() -> list[str]:
    """The installation of this package that a process runs: its version and its file."""
    package = sys.modules[__name__.partition(".")[0]]
    return [str(package.__version__), str(Path(__file__).resolve())]


def _differs(other: list[str]) -> ConfigurationError | None:
    if other == identity():
        return None
    return ConfigurationError(
        expected=f"the checkpoint process to run the package of its training process, {' in '.join(identity())}",
        found=" in ".join(other),
        remedy="The package was installed anew, or sys.path changed, since the job began. Restart the job.",
    )


def _path() -> list[str]:
    """The absolute paths in which this process looks for modules, without those relative to a removed directory."""
    found = []
    for entry in sys.path:
        with suppress(FileNotFoundError):
            found.append(str(Path(entry).absolute()))
    return found


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A block in which processes start that ignore all signals but SIGKILL.

    Schedulers send signals to all processes of a job; the checkpoint process follows its channel instead.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

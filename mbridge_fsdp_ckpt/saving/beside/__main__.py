"""Started by a trainer, with a socket to it: python -m mbridge_fsdp_ckpt.saving.beside DESCRIPTOR PULSE."""

from __future__ import annotations

import logging
import os
import socket
import sys

from mbridge_fsdp_ckpt.saving.beside.channel import Channel
from mbridge_fsdp_ckpt.saving.beside.writing import Writer
from mbridge_fsdp_ckpt.storage.commit import removal

_NICE = 10  # what the writer computes may wait for what the trainer does


class _Told(logging.Handler):
    """Lets the trainer log what is logged here."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Of any thread."""
        text = self.format(record)
        try:
            self._channel.send({"log": [record.levelno, record.name, text]})
        except OSError:  # the trainer has ended: whoever looks, looks at the terminal
            sys.stderr.write(f"{text}\n")


def main() -> None:
    """Serve until the trainer has ended."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    log = logging.getLogger("mbridge_fsdp_ckpt")
    log.setLevel(logging.INFO)
    log.addHandler(_Told(channel))
    log.propagate = False
    os.nice(_NICE)
    Writer(channel, float(sys.argv[2])).serve()
    removal.wait(removal.EXIT_S)
    os._exit(0)  # to take down torch takes a nice process seconds on a busy machine, and the trainer waits


if __name__ == "__main__":
    main()

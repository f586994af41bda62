# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of what a save or load took."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from mbridge_fsdp_ckpt.io import progress_bar
from testing.models import Recipe
from tests.core import cases


class Lines(logging.Handler):
    """What this package says of saves and loads."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_and_load(directory: str, recipe: Recipe, slow_rank: int, seconds: float, shared: str) -> dict[str, Any]:
    """A save in which the flush of one rank takes so many seconds, and a load: what both say, and what the log has."""
    trainable = cases.prepared(recipe, steps=1)
    plain = PayloadWriter.close

    def slow(self: PayloadWriter) -> Any:
        time.sleep(seconds)
        return plain(self)

    log, heard = logging.getLogger("mbridge_fsdp_ckpt.checkpoint"), Lines()
    before = log.level
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    settings = mbridge_fsdp_ckpt.Settings(share_reads=shared)  # type: ignore[arg-type]
    both = {"model": trainable.model, "optimizer": trainable.optimizer, "settings": settings}
    try:
        with patch.object(PayloadWriter, "close", slow) if dist.get_rank() == slow_rank else nullcontext():
            saved = mbridge_fsdp_ckpt.save(directory, **both)
        loaded = mbridge_fsdp_ckpt.load(directory, **both)
    finally:
        log.removeHandler(heard)
        log.setLevel(before)
    costs = ("bytes", "bytes_of_all", "seconds", "duration")
    return {
        "saved": {name: getattr(saved, name) for name in costs},
        "loaded": {name: getattr(loaded, name) for name in costs},
        "lines": heard.lines,
        "now": time.time(),
    }


@contextmanager
def standard_error(kind: Literal["terminal", "pipe"]) -> Iterator[bytearray]:
    """A pseudo-terminal or a pipe as this rank's standard error; what was written to it."""
    ours, theirs = os.openpty() if kind == "terminal" else os.pipe()
    written = bytearray()

    def read() -> None:
        try:
            while block := os.read(ours, 4096):
                written.extend(block)
        except OSError:  # how a pseudo-terminal ends
            pass

    reader, before = threading.Thread(target=read), sys.stderr
    reader.start()
    with patch.dict(os.environ, {"TERM": "xterm", "COLUMNS": "120"}), os.fdopen(theirs, "w") as sys.stderr:
        try:
            yield written
        finally:
            sys.stderr.flush()
            sys.stderr.close()
            sys.stderr = before
            reader.join()
            os.close(ours)


def shown(
    directory: str, recipe: Recipe, kind: Literal["terminal", "pipe"], wanted: bool, patience: float, share: bool
) -> str:
    """What a save and a load write to this rank's standard error."""
    trainable = cases.prepared(recipe, steps=1)
    settings = mbridge_fsdp_ckpt.Settings(progress=wanted, share_reads="always" if share else "never")
    both = {"model": trainable.model, "optimizer": trainable.optimizer, "settings": settings}
    with patch.object(progress_bar, "PATIENCE", patience), standard_error(kind) as written:
        mbridge_fsdp_ckpt.save(directory, **both)
        mbridge_fsdp_ckpt.load(directory, **both)
    return written.decode()

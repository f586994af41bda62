# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a commit is given, and what it does: the protocol of `rename.RenameCommit` and `marker.MarkerCommit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.store import AnyPath


@dataclass(frozen=True, slots=True)
class Content:
    """What one rank adds to what all ranks wrote.

    Args:
        manifest: The metadata's bytes, given the entries of the files beside payload and index.
        flushed: Tells of a name whether that file is on disk already.
        add_files: Puts more files into an empty local directory.
        write_view: Writes what stock needs into a directory; None where nobody wants it.
        progress: Called after each step.
        last_call: Called just before the step that cannot be undone; raises where nobody waits for it any more.
    """

    manifest: Callable[[tuple[ExtraEntry, ...]], bytes]
    flushed: Callable[[str], bool]
    add_files: Callable[[Path], None] | None = None
    write_view: Callable[[AnyPath], None] | None = None
    progress: Callable[[], None] = lambda: None
    last_call: Callable[[], None] = lambda: None


class Commit(Protocol):
    """One checkpoint on its way to its place."""

    @property
    def directory(self) -> AnyPath:
        """Where every rank writes."""

    @property
    def suffix(self) -> str:
        """What the names of payload and index files carry before their extension."""

    def finish(self, content: Content) -> list[AnyPath]:
        """Put the checkpoint in its place and flush the change; what nobody needs any more, to be deleted."""

    def abort(self) -> None:
        """See to it that what was written is deleted."""

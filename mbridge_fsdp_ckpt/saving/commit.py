# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of a save: where all ranks write, and the commit of what they wrote."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from mbridge_fsdp_ckpt.commit import methods, removal
from mbridge_fsdp_ckpt.commit.content import Commit
from mbridge_fsdp_ckpt.commit.finishing import finish, metadata
from mbridge_fsdp_ckpt.commit.target import check_replaceable
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.errors import CheckpointError, describe_unexpected
from mbridge_fsdp_ckpt.format.names import Files, token
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.format.write_results import WriteResult
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import Section
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.versions import writer_versions

_log = logging.getLogger(__name__)


class Place(TypedDict):
    """Where all ranks write.

    Args:
        directory: The directory that they write to.
        save: The save's token, a part of file names; see `Files`.
        suffix: The end of file names; see `Files`.
    """

    directory: str
    save: str
    suffix: str


def files_of(place: Place) -> Files:
    """The names of the files that ranks write at a place."""
    return Files(place["save"], place["suffix"])


@cache
def say_view_left_out(chunks: int) -> None:
    """Log once that saves of this size have no DCP metadata, so that stock cannot read them."""
    _log.warning(
        "saves of %d chunks are written without DCP metadata (.metadata), which would cost rank 0 about %d seconds "
        'each. If stock has to read them, set dcp_metadata="always", or add it later with: '
        "mbridge_fsdp_ckpt repair --stock-view",
        chunks,
        chunks // 50_000,
    )


@dataclass(slots=True)
class Job:
    """One save, as rank 0 performs it: it makes the staging directory, and commits.

    Args:
        target: The checkpoint directory to make or replace.
        settings: The settings of the save.
        coordination: The coordination of the save.
        values: Non-tensor state that belongs to no single rank.
        add_files: Called with an empty folder whose files are committed, too; None adds none.
        after_commit: Called once the checkpoint is in its place; None calls nothing.
        working: The working directory of the training process; None means that of this process.
    """

    target: AnyPath
    settings: Settings
    coordination: Coordination
    values: Mapping[str, Any]
    add_files: Callable[[Path], None] | None
    after_commit: Callable[[], None] | None = None
    working: Path | None = None
    _commit: Commit | None = field(default=None)
    _replaced: list[AnyPath] = field(default_factory=list)
    _files: Files = field(default_factory=lambda: Files(""))

    def begin(self) -> Place:
        """Make the staging directory; returns where to write.

        Raises:
            ConfigurationError: The target must not be replaced.
            OSError: The storage refused.
        """
        check_replaceable(self.target, self.working)
        methods.recover(self.target)
        removal.delete_later(methods.condemn_leftovers(self.target, self.settings.commit))
        self._commit = methods.begin(self.target, self.settings.commit)
        self._files = Files(token(), self._commit.suffix)
        return {"directory": str(self._commit.directory), "save": self._files.save, "suffix": self._files.suffix}

    def finish(self, result: WriteResult, sections: tuple[Section, ...], topology: dict[str, int | str]) -> None:
        """Check what all ranks wrote, write the metadata, commit.

        Args:
            result: What all ranks wrote.
            sections: The sections of the checkpoint.
            topology: See `WritePlan`.
        """
        assert self._commit is not None
        manifest = metadata(
            writer=writer_versions(training=True),
            topology=topology,
            sections=sections,
            files=self._files,
            result=result,
            directory=self._commit.directory,
            values=encode_mapping(self.values, "values"),
            time=time.time(),
        )
        chunks = result["chunks"]
        with_view = self.settings.writes_dcp_metadata(chunks)
        if not with_view and self.settings.dcp_metadata == "auto":
            say_view_left_out(chunks)
        self._replaced = finish(
            self._commit,
            manifest,
            view_of=self.values if with_view else None,
            add_files=self.add_files,
            progress=self.coordination.heartbeat,
            last_call=self.coordination.fence,
        )
        self._commit = None
        self._follow_up()

    def _follow_up(self) -> None:
        """Call `after_commit` while the other ranks wait, so that they raise its error, too."""
        self.coordination.heartbeat()
        try:
            if self.after_commit is not None:
                self.after_commit()
        except (Exception, SystemExit) as error:
            _log.exception("%s is committed and in its place, but after_commit failed", self.target)
            named = describe_unexpected(error, rank=self.coordination.rank, doing="following up the commit")
            stands = f"The checkpoint is complete and in its place, a tracker may name the previous one: {self.target}."
            raise CheckpointError.from_wire(named.to_wire() | {"remedy": f"{stands} {named.remedy}"}) from error

    def clean_up(self) -> None:
        """Delete what was replaced, or what a failed save has written, in the background, after the decision."""
        removal.delete_later(self._replaced)
        if self._commit is not None:
            try:
                self._commit.abort()
            except OSError:
                _log.warning("could not remove %s", self._commit.directory, exc_info=True)

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
    """Where all ranks write, and what their files are called: see `Files`."""

    directory: str
    save: str
    suffix: str


def files_of(place: Place) -> Files:
    """What files are called at a place."""
    return Files(place["save"], place["suffix"])


@cache
def say_view_left_out(chunks: int) -> None:
    """Say once that stock cannot read what a job saves."""
    _log.warning(
        "DCP metadata (.metadata) is left out of saves of %d chunks: it would cost rank 0 some %d seconds each. "
        'Say dcp_metadata="always" if stock is to read them, or make it later: mbridge_fsdp_ckpt repair --stock-view',
        chunks,
        chunks // 50_000,
    )


@dataclass(slots=True)
class Job:
    """One save, as rank 0 does it: it owns the staging directory, and commits.

    `working` is the directory that the training process works in, where that is another one.
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
        """Make the staging directory, unless something else than a checkpoint is in the way; returns where to write."""
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
            sections: Of the checkpoint.
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
        """What the caller does after a commit: others must not go on while this rank fails at it."""
        self.coordination.heartbeat()
        try:
            if self.after_commit is not None:
                self.after_commit()
        except (Exception, SystemExit) as error:
            _log.exception("%s is in its place, what follows failed", self.target)
            named = describe_unexpected(error, rank=self.coordination.rank, doing="following up the commit")
            stands = f"The checkpoint is complete and in its place, a tracker may name the one before: {self.target}."
            raise CheckpointError.from_wire(named.to_wire() | {"remedy": f"{stands} {named.remedy}"}) from error

    def clean_up(self) -> None:
        """After the decision: have deleted what was replaced, or what a save that failed has written."""
        removal.delete_later(self._replaced)
        if self._commit is not None:
            try:
                self._commit.abort()
            except OSError:
                _log.warning("could not remove %s", self._commit.directory, exc_info=True)

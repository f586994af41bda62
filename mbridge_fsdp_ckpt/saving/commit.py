# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of a save: it checks what all ranks bring, and commits what they wrote."""

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
from mbridge_fsdp_ckpt.coverage import plans, replicas
from mbridge_fsdp_ckpt.coverage.plans import BlockRow
from mbridge_fsdp_ckpt.coverage.replicas import CopyRow
from mbridge_fsdp_ckpt.coverage.rows import Rows
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, ReplicaMismatchError, describe_unexpected
from mbridge_fsdp_ckpt.format.names import Files, token
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.format.write_results import WriteResult, count_keys, together
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import Section
from mbridge_fsdp_ckpt.saving.write_plan import Announced
from mbridge_fsdp_ckpt.saving.writer import Place, Written
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.versions import writer_versions

_log = logging.getLogger(__name__)


class PlansDecided(TypedDict):
    """Where to write; or, for now, the buckets in which plans do not add up."""

    disputed: list[int]
    place: Place | None


class WrittenDecided(TypedDict):
    """Buckets in which copies do not add up; without any, it is committed.  And what all wrote, in bytes of payload."""

    differing: list[int]
    bytes: int


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
    """One save, as rank 0 does it: it decides at the meetings, owns the staging directory, and commits.

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
    _sections: tuple[Section, ...] = field(default=())
    _topology: dict[str, int | str] = field(default_factory=dict)
    _remainders: dict[int, int] = field(default_factory=dict)
    _files: Files = field(default_factory=lambda: Files(""))
    _result: WriteResult = field(default_factory=lambda: together([]))

    def decide_plans(self, announced: Announced) -> PlansDecided:
        """First meeting: do the plans tile every tensor?  Makes the staging directory if so."""
        sections, *others = map(tuple, announced["sections"])
        if others:
            raise ConfigurationError(
                expected="all ranks to save the same sections",
                found=" and ".join(", ".join(s) for s in announced["sections"]),
                remedy="Pass the optimizer on every rank, or on none.",
            )
        self._sections, self._topology = sections, announced["topology"]
        self._remainders = plans.remainders_of(announced["fingerprint"])
        return {"disputed": list(self._remainders), "place": None if self._remainders else self._begin()}

    def decide_dispute(self, rows: Rows[BlockRow]) -> Place:
        """Only where plans do not add up: tensors that some ranks do not hold may be in order all the same."""
        plans.decide(rows, self._remainders)
        return self._begin()

    def _begin(self) -> Place:
        """Make the staging directory, unless something else than a checkpoint is in the way; returns where to write."""
        check_replaceable(self.target, self.working)
        methods.recover(self.target)
        removal.delete_later(methods.condemn_leftovers(self.target, self.settings.commit))
        self._commit = methods.begin(self.target, self.settings.commit)
        self._files = Files(token(), self._commit.suffix)
        return {"directory": str(self._commit.directory), "save": self._files.save, "suffix": self._files.suffix}

    def decide_written(self, written: Written) -> WrittenDecided:
        """Second meeting: commit what all ranks wrote, unless there are buckets in which copies do not add up."""
        self._result = written["result"]
        self._remainders = plans.remainders_of(written["replicas"])
        if not self._remainders:
            self._finish()
        return {"differing": list(self._remainders), "bytes": self._result["bytes"]}

    def decide_replicas(self, rows: Rows[CopyRow]) -> None:
        """Only where hashes of copies do not add up: name the copies, then commit or not, as the settings say."""
        error = replicas.mismatch(rows, self._remainders)
        if error is not None and (self.settings.replicas == "error" or not isinstance(error, ReplicaMismatchError)):
            raise error
        if error is not None:
            _log.warning("%s", error)
        self._finish()

    def _finish(self) -> None:
        """Check what all ranks wrote, write the metadata, commit."""
        assert self._commit is not None
        result = self._result
        keys = count_keys(self._commit.directory, self._files, result)
        manifest = metadata(
            writer=writer_versions(training=True),
            topology=self._topology,
            sections=self._sections,
            files=self._files,
            result=result,
            keys=keys,
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

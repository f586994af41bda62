# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a user may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, Literal, get_args

from mbridge_fsdp_ckpt.errors import ConfigurationError

DEFAULT_TIME_LIMIT, DEFAULT_STORAGE_LIMIT = 120.0, 1800.0  # seconds

CommitMethod = Literal["auto", "rename", "marker"]
COMMIT_METHODS: tuple[CommitMethod, ...] = get_args(CommitMethod)
DCP_METADATA_CHOICES = ("auto", "always", "never")
SHARING_CHOICES = ("auto", "always", "never")
VERIFY_CHOICES = ("full", "header")
REPLICA_CHOICES = ("warn", "error", "ignore")
BUSY_CHOICES = ("wait", "skip")
LEAST_STAGING = 1 << 24
"""Bytes of two portions of staging memory: one is filled while the other is written."""
AUTO_DCP_CHUNKS = 64_000
"""Largest number of chunks, over all ranks, for which "auto" writes DCP metadata: a second of rank 0, in the first save
of a training, and 80 MB, both proportional to it (`benchmarks/results/stock_view.md`)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of saves and loads, to be the same on all ranks.

    Args:
        time_limit: Seconds without a heartbeat of any rank after which a waiting rank gives up.
        storage_limit: Seconds that a rank may be inside one call of the storage, such as a flush, until its heartbeats
            stop.
        dcp_metadata: Whether a save writes `.metadata` and the pickled values that stock needs to read it: "auto" does
            up to 64,000 chunks over all ranks, a second of rank 0 in the first save; above, it says so once.  This
            package reads neither.
        verify: What a load checks before it changes anything: "full" also hashes every byte that this rank reads,
            "header" checks structure and sizes, and reads once.
        read_buffer: Bytes of verified weights that each rank may keep on the host until all ranks have verified theirs;
            what does not fit is read again. None: a quarter of the host's available memory, shared among its ranks.
        share_reads: Whether ranks that hold copies of a tensor (hybrid sharding, `no_shard`, norms) read it for each
            other in a load, each its part, and pass it on over gloo: "auto" where they have no page cache in common,
            which is of an object store, and of a file system where the job runs on several hosts.
        replicas: What a save does where ranks that hold copies of a tensor (norms, hybrid sharding, buffers) hold other
            values: "warn" names keys and ranks in rank 0's log, "error" refuses; "ignore" does not compare, apart from
            quantizers' buffers, of which values would be lost.
        commit: How a save is committed: "rename" on file systems, "marker" in object stores; "auto" goes by the path.
            Say "marker" for a mounted file system whose renames are not atomic.
        allow_missing: Patterns (`fnmatch`) of keys that a load may not find.
        allow_unexpected: Patterns of keys in the checkpoint that a load may leave unread.
        allow_cast: Patterns of keys of optimizer slots that a load may round to the lower precision in which the live
            optimizer keeps them, or hand to an optimizer of another class of which it is not known what it keeps.
        vocabulary_size: Rows of embeddings and output layer that are tokens; the others are padding, and a checkpoint
            with other padding loads.  Bridge's plug-in takes it from the model's configuration.
        staging_limit: Bytes of host memory, in portions of 8 MiB, into which each rank copies what an asynchronous
            save writes. None: as many as it writes. With fewer, an optimizer's step waits until enough is written.
        when_busy: What an asynchronous save does while the one before goes on: "wait" until that has ended, or
            "skip" this one, with a line in the log.
        progress: Whether rank 0 shows a bar of its bytes on standard error where a save or load takes longer than 1.5
            seconds; only on a terminal, and not where the environment variable MBRIDGE_FSDP_CKPT_PROGRESS is 0.

    Raises:
        ConfigurationError: A choice is unknown, or a value is not a number where one is needed.
    """

    time_limit: float = DEFAULT_TIME_LIMIT
    storage_limit: float = DEFAULT_STORAGE_LIMIT
    dcp_metadata: Literal["auto", "always", "never"] = "auto"
    verify: Literal["full", "header"] = "full"
    read_buffer: int | None = None
    share_reads: Literal["auto", "always", "never"] = "auto"
    replicas: Literal["warn", "error", "ignore"] = "warn"
    commit: CommitMethod = "auto"
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_cast: tuple[str, ...] = ()
    vocabulary_size: int | None = None
    staging_limit: int | None = None
    when_busy: Literal["wait", "skip"] = "wait"
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("time_limit", "storage_limit"):
            object.__setattr__(self, name, float(_number(name, getattr(self, name), Real)))
        for name in ("read_buffer", "vocabulary_size", "staging_limit"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(_number(name, getattr(self, name), Integral)))
        _check_choice("dcp_metadata", self.dcp_metadata, DCP_METADATA_CHOICES)
        _check_choice("verify", self.verify, VERIFY_CHOICES)
        _check_choice("share_reads", self.share_reads, SHARING_CHOICES)
        _check_choice("replicas", self.replicas, REPLICA_CHOICES)
        _check_choice("commit", self.commit, COMMIT_METHODS)
        _check_choice("when_busy", self.when_busy, BUSY_CHOICES)
        if self.staging_limit is not None and self.staging_limit < LEAST_STAGING:
            raise ConfigurationError(
                expected=f"staging_limit of at least {LEAST_STAGING} bytes",
                found=str(self.staging_limit),
                remedy="Leave it out, or raise it.",
            )
        if self.read_buffer is not None and self.read_buffer < 0:
            raise ConfigurationError(
                expected="read_buffer in bytes, 0 for none", found=str(self.read_buffer), remedy="Leave it out."
            )

    def writes_dcp_metadata(self, chunks: int) -> bool:
        """Whether a save of so many chunks, over all ranks, writes DCP metadata."""
        return self.dcp_metadata == "always" or (self.dcp_metadata == "auto" and chunks <= AUTO_DCP_CHUNKS)

    def for_vocabulary(self, tokens: int | None) -> Settings:
        """The same for a model of so many tokens, unless the user gave another number."""
        return replace(self, vocabulary_size=tokens) if self.vocabulary_size is None else self

    def without_optimizer(self) -> Settings:
        """The same for a run that keeps no optimizer state, and so may load without."""
        return replace(self, allow_missing=(*self.allow_missing, "optimizer.*"))

    def may_be_missing(self, key: str) -> bool:
        """Whether the user allows a key to be absent."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_missing)

    def may_be_unexpected(self, key: str) -> bool:
        """Whether the user allows a key of the checkpoint to stay unread."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_unexpected)

    def may_be_cast(self, key: str) -> bool:
        """Whether the user allows a slot to lose precision, or to change its optimizer."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_cast)


def _number(name: str, value: Any, kind: type[Any]) -> Any:
    """A number of whoever's, NumPy's say."""
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
        what = "a number" if kind is Real else "a whole number"
        raise ConfigurationError(
            expected=f"{name} to be {what}", found=repr(value), remedy="Leave it out, or give one."
        )
    return value


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            expected=f"{name} to be one of {', '.join(choices)}", found=repr(value), remedy=f"Use {choices[0]!r}."
        )

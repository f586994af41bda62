# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The settings of saves and loads."""

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
    """Settings of saves and loads.  They have to be the same on all ranks.

    Args:
        time_limit: Seconds for which a rank waits for the others at a meeting.  Every rank gives heartbeats while it
            works, and each of them restarts the limit.  When it has passed, the save or load fails on all ranks with an
            error that names the missing ranks.
        storage_limit: Seconds that a rank may spend inside one call of the storage, such as a flush.  After that its
            heartbeats stop, so that `time_limit` later the save or load fails on all ranks.
        dcp_metadata: Whether a save also writes `.metadata` and the pickled values, which stock needs to read the
            checkpoint.  This package reads neither.  "auto" writes them for up to 64,000 chunks over all ranks, which
            costs rank 0 about a second in the first save; above, it logs once that they are left out.
        verify: What a load checks before it changes anything.  "full" also hashes every byte that this rank reads;
            "header" checks structure and sizes only, and reads each byte once.
        read_buffer: Bytes of verified weights that each rank keeps on the host until all ranks have verified theirs.
            Weights that do not fit are read again.  None means a quarter of the host's available memory, shared among
            its ranks.
        share_reads: Whether ranks that hold copies of a tensor (hybrid sharding, `no_shard`, norms) each read a part
            of it in a load, and pass it on to the others over gloo.  "auto" does so where these ranks share no page
            cache: with an object store, or with a file system if the job runs on several hosts.
        replicas: What a save does if copies of a tensor differ between ranks (norms, hybrid sharding, buffers).  "warn"
            logs keys and ranks on rank 0, "error" fails the save, "ignore" does not compare them, except for buffers of
            quantizers, whose values would be lost.
        commit: How a save is committed: "rename" for file systems, "marker" for object stores.  "auto" chooses
            "marker" if the directory is a URL, else "rename".  Choose "marker" for a mounted file system whose renames
            are not atomic.
        allow_missing: Patterns (`fnmatch`) of keys that the checkpoint may lack.
        allow_unexpected: Patterns of keys in the checkpoint that a load may leave unread.
        allow_cast: Patterns of keys of optimizer slots that a load may round to the lower precision of the live
            optimizer, or hand to an optimizer of another class whose slots this package does not know.
        vocabulary_size: Number of rows of the embeddings and the output layer that are tokens.  The other rows are
            padding, and a checkpoint with a different number of padding rows loads.  None means that it is unknown, so
            that shapes must be equal.  Bridge's plug-in sets it from the model's configuration.
        staging_limit: Bytes of host memory, in portions of 8 MiB, into which each rank copies the tensors that an
            asynchronous save writes.  None means as many bytes as the rank writes.  With fewer, the optimizer's step
            waits until enough of them are written.
        when_busy: What an asynchronous save does while the previous one is in progress: "wait" until that has ended, or
            "skip" this save, with a line in the log.
        progress: Whether rank 0 shows a progress bar on standard error if a save or load takes longer than 1.5 seconds.
            It does so only on a terminal, and not if the environment variable MBRIDGE_FSDP_CKPT_PROGRESS is 0.

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
                remedy="Leave staging_limit out, or raise it.",
            )
        if self.read_buffer is not None and self.read_buffer < 0:
            raise ConfigurationError(
                expected="read_buffer of 0 bytes or more",
                found=str(self.read_buffer),
                remedy="Leave read_buffer out, or give a number of bytes.",
            )

    def writes_dcp_metadata(self, chunks: int) -> bool:
        """Whether a save with this number of chunks over all ranks writes DCP metadata."""
        return self.dcp_metadata == "always" or (self.dcp_metadata == "auto" and chunks <= AUTO_DCP_CHUNKS)

    def for_vocabulary(self, tokens: int | None) -> Settings:
        """These settings with the number of tokens of a model's vocabulary, unless the user has set one."""
        return replace(self, vocabulary_size=tokens) if self.vocabulary_size is None else self

    def without_optimizer(self) -> Settings:
        """These settings for a run that saves no optimizer state, and so may load a checkpoint without any."""
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
    """Check that a value is a finite number, of Python or another library such as NumPy."""
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
        what = "a number" if kind is Real else "a whole number"
        raise ConfigurationError(
            expected=f"{name} to be {what}", found=repr(value), remedy=f"Leave {name} out, or give {what}."
        )
    return value


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            expected=f"{name} to be one of {', '.join(choices)}",
            found=repr(value),
            remedy=f"Leave {name} out, or use {choices[0]!r}.",
        )

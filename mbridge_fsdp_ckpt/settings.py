"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from mbridge_fsdp_ckpt.agreement import DEFAULT_TIME_LIMIT
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.storage.commit import COMMIT_METHODS, CommitMethod

DCP_METADATA_CHOICES = ("auto", "always", "never")
VERIFY_CHOICES = ("full", "header")
AUTO_DCP_RANKS = 512  # largest job for which "auto" writes stock's .metadata


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of saves and loads.

    Args:
        time_limit: Seconds without a sign of life after which a waiting rank gives up.
        dcp_metadata: Whether a save writes `.metadata` and the pickled values that stock needs to read it: "auto" does
            up to 512 ranks.  This package reads neither.
        verify: What a load checks before it changes anything: "full" also hashes every byte that this rank reads,
            "header" checks structure and sizes, and reads once.
        commit: How a save is committed: "rename" on file systems, "marker" in object stores; "auto" goes by the path.
            Say "marker" for a mounted file system whose renames are not atomic.
        allow_missing: Patterns (`fnmatch`) of keys that a load may not find.
        allow_unexpected: Patterns of keys in the checkpoint that a load may leave unread.
        vocabulary_size: Rows of embeddings and output layer that are tokens; the others are padding, and a checkpoint
            with other padding loads.  Bridge's plug-in takes it from the model's configuration.

    Raises:
        ConfigurationError: An unknown choice.
    """

    time_limit: float = DEFAULT_TIME_LIMIT
    dcp_metadata: Literal["auto", "always", "never"] = "auto"
    verify: Literal["full", "header"] = "full"
    commit: CommitMethod = "auto"
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        _check_choice("dcp_metadata", self.dcp_metadata, DCP_METADATA_CHOICES)
        _check_choice("verify", self.verify, VERIFY_CHOICES)
        _check_choice("commit", self.commit, COMMIT_METHODS)

    def writes_dcp_metadata(self, world_size: int) -> bool:
        """Whether a save of this many ranks writes stock's view."""
        return self.dcp_metadata == "always" or (self.dcp_metadata == "auto" and world_size <= AUTO_DCP_RANKS)

    def may_be_missing(self, key: str) -> bool:
        """Whether the user allows a key to be absent."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_missing)

    def may_be_unexpected(self, key: str) -> bool:
        """Whether the user allows a key of the checkpoint to stay unread."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_unexpected)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            expected=f"{name} to be one of {', '.join(choices)}", found=repr(value), remedy=f"Use {choices[0]!r}."
        )

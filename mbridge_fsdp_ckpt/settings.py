"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from mbridge_fsdp_ckpt.agreement import DEFAULT_TIME_LIMIT
from mbridge_fsdp_ckpt.errors import ConfigurationError

DCP_METADATA_CHOICES = ("auto", "always", "never")
AUTO_DCP_RANKS = 512  # largest job for which "auto" writes stock's .metadata


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of saves and loads.

    Args:
        time_limit: Seconds without a sign of life after which a waiting rank gives up.
        dcp_metadata: Whether a save writes `.metadata` and the pickled values that stock needs to read it: "auto" does
            up to 512 ranks.  This package reads neither.
        allow_missing: Patterns (`fnmatch`) of keys that a load may not find.
        allow_unexpected: Patterns of keys in the checkpoint that a load may leave unread.
        vocabulary_size: Rows of embeddings and output layer that are tokens; the others are padding, and a checkpoint
            with other padding loads.  Bridge's plug-in takes it from the model's configuration.

    Raises:
        ConfigurationError: An unknown choice.
    """

    time_limit: float = DEFAULT_TIME_LIMIT
    dcp_metadata: Literal["auto", "always", "never"] = "auto"
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        if self.dcp_metadata not in DCP_METADATA_CHOICES:
            raise ConfigurationError(
                expected=f"dcp_metadata to be one of {', '.join(DCP_METADATA_CHOICES)}",
                found=repr(self.dcp_metadata),
                remedy="Use 'auto' unless stock has to read very large checkpoints.",
            )

    def writes_dcp_metadata(self, world_size: int) -> bool:
        """Whether a save of this many ranks writes stock's view."""
        return self.dcp_metadata == "always" or (self.dcp_metadata == "auto" and world_size <= AUTO_DCP_RANKS)

    def may_be_missing(self, key: str) -> bool:
        """Whether the user allows a key to be absent."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_missing)

    def may_be_unexpected(self, key: str) -> bool:
        """Whether the user allows a key of the checkpoint to stay unread."""
        return any(fnmatchcase(key, pattern) for pattern in self.allow_unexpected)

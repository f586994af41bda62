# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, by name.

Each says what was expected, what was found, on which rank and key, and what to do.  An error can cross
ranks as plain data (`to_wire`, `from_wire`), so that one rank's failure is raised as the same error everywhere.
"""

from __future__ import annotations

import socket
from typing import Any, ClassVar

from mbridge_fsdp_ckpt.printable import printable

type ErrorData = dict[str, str | int | None]
"""An error as JSON-able data."""

_WIRE_TEXT_LIMIT = 8_000  # characters a text field keeps on its way to other ranks


class CheckpointError(Exception):
    """Base of all named errors of this package.  The message is one line and safe to print, the fields are as given.

    Args:
        expected: What should have been there.
        found: What was there instead.
        remedy: What the user can do.
        rank: Global rank on which it was found, if it belongs to one.
        key: Checkpoint key, parameter or file it is about, if any.
        host: That rank's host.
        phase: What that rank was doing, in words that follow "while".
    """

    _by_name: ClassVar[dict[str, type[CheckpointError]]] = {}

    def __init__(
        self,
        *,
        expected: str,
        found: str,
        remedy: str,
        rank: int | None = None,
        key: str | None = None,
        host: str | None = None,
        phase: str | None = None,
    ) -> None:
        self.expected, self.found, self.remedy, self.rank, self.key = expected, found, remedy, rank, key
        self.host, self.phase = host, phase
        super().__init__(self._message())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CheckpointError._by_name[cls.__name__] = cls

    def _message(self) -> str:
        on = f" on {self.host}" if self.host else ""
        parts = (
            f"rank {self.rank}{on}" if self.rank is not None else "",
            f"while {self.phase}" if self.phase else "",
            self.key or "",
        )
        where = ", ".join(part for part in parts if part)
        prefix = f"[{where}] " if where else ""
        return printable(f"{prefix}expected {self.expected}; found {self.found}. {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointError.from_wire, (self.to_wire(),)

    def at_rank(self, rank: int, phase: str | None = None) -> CheckpointError:
        """The same error with this process's rank and host, and the phase, filled in where they were still open."""
        wire = self.to_wire()
        if self.rank is None:
            wire |= {"rank": rank, "host": socket.gethostname()}
        wire["phase"] = self.phase or phase
        return self if wire == self.to_wire() else CheckpointError.from_wire(wire)

    def to_wire(self) -> ErrorData:
        """This error as JSON-able data."""
        text = {name: str(getattr(self, name))[:_WIRE_TEXT_LIMIT] for name in ("expected", "found", "remedy")}
        place = {name: getattr(self, name) for name in ("rank", "key", "host", "phase")}
        return {"error": type(self).__name__, **text, **place}

    @staticmethod
    def from_wire(wire: ErrorData) -> CheckpointError:
        """The error that `to_wire` described; an unknown name becomes `RankFailedError`."""
        fields = {name: wire.get(name) for name in ("expected", "found", "remedy", "rank", "key", "host", "phase")}
        return CheckpointError._by_name.get(str(wire["error"]), RankFailedError)(**fields)  # type: ignore[arg-type]


class UnsupportedVersionError(CheckpointError):
    """A library, or a format version on disk, that this release was not made for."""


class UnknownFormatError(CheckpointError):
    """A checkpoint format name that nobody provides."""


class ConfigurationError(CheckpointError):
    """A setting, or a combination of settings, that cannot work."""


class NotACheckpointError(CheckpointError):
    """A directory that holds no complete checkpoint."""


class ManifestError(CheckpointError):
    """A manifest or index file that contradicts the format."""


class DamagedCheckpointError(CheckpointError):
    """A file that is missing, truncated, or whose bytes are not those that were written."""


class NoTimesError(CheckpointError):
    """A checkpoint that does not say how long its save took."""


class KeyMismatchError(CheckpointError):
    """Keys that the model and the checkpoint do not share, or share with another shape or dtype."""


class LayoutError(CheckpointError):
    """A parameter whose metadata contradicts its local shard."""


class FamilyError(CheckpointError):
    """A family handler whose declaration does not fit the parameter, or that is declared twice."""


class UnsupportedStateError(CheckpointError):
    """Optimizer state, or a value, that the format cannot hold; or a tensor that a load cannot fill."""


class PlanDisagreementError(CheckpointError):
    """Ranks whose plans contradict each other: shapes that differ, rows that nobody or two ranks write."""


class ReplicaMismatchError(CheckpointError):
    """Ranks that hold copies of one tensor hold other values."""


class ExchangeError(CheckpointError):
    """Bytes that one rank read for others did not reach them as they were sent."""


class RankMissingError(CheckpointError):
    """Ranks that did not arrive at a common step within the time limit."""


class ChangedTensorError(CheckpointError):
    """A tensor that changed, or was replaced, between the call of an asynchronous save and its copy."""


class SaveAbandonedError(CheckpointError):
    """An asynchronous save whose training or checkpoint process ended, or fell silent, before it was committed."""


class RankFailedError(CheckpointError):
    """Another rank failed with an error that has no name here."""


class StorageError(CheckpointError):
    """The file system or the object store refused, or did not answer: space, permission, credentials, I/O, network."""


class LoadInterruptedError(CheckpointError):
    """A load failed after it had begun to change live tensors: the model must not be used."""


class InternalError(CheckpointError):
    """Something that cannot happen did: a defect of this package."""


class StoreClientError(OSError):
    """What the client of an object store raised: no credentials, no connection, a refusal with an error of its own.

    Ranks and commands make a `StorageError` of it, as of each `OSError`.  It is no `CheckpointError`: a store that does
    not answer says nothing of a checkpoint, and what catches a damaged one must not catch it.
    """


def brief(error: BaseException) -> str:
    """An exception's name and the beginning of its first line."""
    first, *_ = str(error).splitlines() or [""]
    return printable(f"{type(error).__name__}: {first[:300]}")


def describe_unexpected(error: BaseException, *, rank: int | None, doing: str) -> CheckpointError:
    """Name an exception that is not ours, so that every rank can raise it alike.

    Args:
        error: What was raised.
        rank: The rank it was raised on.
        doing: The phase, in words that follow "while".
    """
    if isinstance(error, CheckpointError):
        return error if rank is None else error.at_rank(rank, doing)
    kind: type[CheckpointError] = StorageError if isinstance(error, OSError) else RankFailedError
    return kind(
        expected=f"{doing} to succeed",
        found=f"{type(error).__name__}: {error}",
        remedy=_remedy_for(error),
        rank=rank,
        host=socket.gethostname() if rank is not None else None,
    )


def _remedy_for(error: BaseException) -> str:
    if isinstance(error, StoreClientError):
        return "Check credentials, endpoint and network, and the installed client of this store; then do it again."
    if isinstance(error, OSError):
        return "Check the storage (space, permissions, quota) and save or load again."
    return "The traceback is in that rank's log."

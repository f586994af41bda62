# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The named errors of this package.

Each says what was expected, what was found, on which rank and key, and what to do.  An error can cross
ranks as plain data (`to_wire`, `from_wire`), so that one rank's failure is raised as the same error on every rank.
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
        expected: What was expected.
        found: What was found instead.
        remedy: What the user can do.
        rank: The global rank on which the error was found; None if it belongs to no rank.
        key: The checkpoint key, parameter or file that the error is about, if any.
        host: The host of that rank.
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
        """The same error with this process's rank and host, and the phase, filled in where they were not set."""
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
    """A library lacks a name that this release uses, or the format version on disk is not one that it reads."""


class UnknownFormatError(CheckpointError):
    """The name of the checkpoint format is not known."""


class ConfigurationError(CheckpointError):
    """A setting or an argument, or a combination of them, cannot work."""


class NotACheckpointError(CheckpointError):
    """The directory holds no complete checkpoint, or it is not clear which checkpoint to load."""


class ManifestError(CheckpointError):
    """A manifest or index file contradicts the format."""


class DamagedCheckpointError(CheckpointError):
    """A file is missing or truncated, or its bytes differ from those that were written."""


class NoTimesError(CheckpointError):
    """The checkpoint does not record how long its save took."""


class KeyMismatchError(CheckpointError):
    """Model and checkpoint have different keys, or the same keys with different shapes, dtypes or values."""


class LayoutError(CheckpointError):
    """The metadata of a parameter contradicts its local shard."""


class FamilyError(CheckpointError):
    """A family's declaration does not fit the parameter, or a family is declared twice or not installed."""


class UnsupportedStateError(CheckpointError):
    """The format cannot hold some optimizer state, tensor or value, or a load cannot fill a tensor."""


class PlanDisagreementError(CheckpointError):
    """The plans of ranks contradict each other: a shape differs, or rows are written by no rank or by two."""


class ReplicaMismatchError(CheckpointError):
    """The copies that several ranks hold of one tensor differ."""


class ExchangeError(CheckpointError):
    """Bytes that one rank read for other ranks were changed on their way."""


class RankMissingError(CheckpointError):
    """Some ranks did not arrive at a meeting within the time limit, or the rendezvous store did not answer."""


class ChangedTensorError(CheckpointError):
    """A tensor was changed or replaced between the call of an asynchronous save and its copy."""


class SaveAbandonedError(CheckpointError):
    """The training process or the checkpoint process ended, or stopped responding, before a save was committed."""


class RankFailedError(CheckpointError):
    """A rank failed with an exception that is not one of this package."""


class StorageError(CheckpointError):
    """The file system or the object store failed: space, permission, credentials, I/O, network."""


class LoadInterruptedError(CheckpointError):
    """A load failed after it had begun to change live tensors.  The model must not be used."""


class InternalError(CheckpointError):
    """A defect of this package: something happened that cannot happen."""


class StoreClientError(OSError):
    """The client of an object store failed: no credentials, no connection, or an error of its own.

    Ranks and commands turn it into a `StorageError`, like every `OSError`.  It is not a `CheckpointError`: a store that
    does not answer proves nothing about a checkpoint, and code that catches a damaged one must not catch it.
    """


def brief(error: BaseException) -> str:
    """The class name of an exception and the beginning of its first line."""
    first, *_ = str(error).splitlines() or [""]
    return printable(f"{type(error).__name__}: {first[:300]}")


def describe_unexpected(error: BaseException, *, rank: int | None, doing: str) -> CheckpointError:
    """Turn any exception into a named error, which every rank can raise.

    Args:
        error: The exception.
        rank: The rank on which it was raised; None if it belongs to no rank.
        doing: What the rank was doing, in words that follow "while".
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

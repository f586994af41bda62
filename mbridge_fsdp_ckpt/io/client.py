# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The one place that names what clients of object stores raise.

fsspec's file systems raise what their clients do: some `OSError`, botocore's own errors, ValueError, RuntimeError.  All
that this package asks of a store goes through such a file system, and through the files that it opens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from mbridge_fsdp_ckpt.errors import StoreClientError, brief

_log = logging.getLogger(__name__)
_spec: Any = import_module("fsspec.spec")  # it brings no types
_AS_THEY_ARE = (OSError, NotImplementedError)  # the latter says that a client has no such call: universal_pathlib asks
_ANSWER_NO = ("exists", "isdir", "isfile")
"""Calls whose `False` may hide an error: fsspec's own take a refusal, or no answer, for that."""


class NamingErrors:
    """A client, or a file that it opened: every call raises an `OSError` if it fails.

    Args:
        inner: The client.
        place: What it was made for, for errors.
    """

    def __init__(self, inner: Any, place: str) -> None:
        self._inner, self._place = inner, place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_inner", "_place"):  # asked by copy, before there is an inner one
            raise AttributeError(name)
        found = getattr(self._inner, name)
        if not callable(found) or isinstance(found, type):
            return found

        @functools.wraps(found)
        def call(*args: Any, **named: Any) -> Any:
            try:
                result = found(*args, **named)
                if name in _ANSWER_NO and not result:
                    self._check_answered(name, *args)
            except PermissionError as error:
                raise _denied(error, name, args, self._place) from error
            except _AS_THEY_ARE:
                raise
            except Exception as error:
                raise _named(error, self._place) from error
            return self._opened(result, *args, **named) if name == "open" else result

        return call

    def _check_answered(self, name: str, path: str) -> None:
        """Raise what the client raises about a path of which it has said no."""
        if name == "exists" and type(self._inner).exists is not _spec.AbstractFileSystem.exists:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            self._inner.info(path)

    def _opened(self, file: Any, path: str, mode: str = "rb", **named: Any) -> _File:
        remove = functools.partial(self._inner.rm_file, path) if mode[0] in "wx" else None
        return _File(file, self._place, remove)


class _File(NamingErrors):
    """A file that a client opened.  A block that ends by an error gives up what it wrote.

    Args:
        inner, place: See `NamingErrors`.
        remove: Deletes it; None where it is only read, or appended to.
    """

    def __init__(self, inner: Any, place: str, remove: Callable[[], None] | None) -> None:
        super().__init__(inner, place)
        self._remove = remove

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._inner)

    def discard(self) -> None:
        """Close it; an upload is not completed.  What stood there stays, unless the client writes in place."""
        try:
            if self._remove is None:
                self._inner.close()
            else:
                _give_up(self._inner, self._remove)
        except Exception as error:  # behind the error that is being raised
            _log.warning("an upload to %s was not given up: %s", self._place, brief(error))


def _give_up(file: Any, remove: Callable[[], None]) -> None:
    """Have nothing of a file appear.  `close`, which runs when it is collected, too, completes an upload."""
    if isinstance(file, _spec.AbstractBufferedFile):
        file.discard()
        file.closed = True
        return
    getattr(file, "discard", file.close)()
    if not file.closed and hasattr(file, "_file"):  # Multi-Storage Client uploads that from memory
        file._file.close()
    if not file.closed:  # it was written in place
        file.close()
        remove()


def _denied(error: PermissionError, call: str, args: tuple[Any, ...], place: str) -> StoreClientError:
    """Clients say that something was denied, and not what."""
    what = f"{call} of {args[0]}" if args and isinstance(args[0], str) else call
    return StoreClientError(f"{brief(error)}: {what} is not allowed with these credentials, of the client for {place}")


def _named(error: Exception, place: str) -> StoreClientError:
    return StoreClientError(f"{brief(error)}, of the client for {place}")

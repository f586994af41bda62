"""The one place that names what clients of object stores raise.

fsspec's file systems raise what their clients do: some `OSError`, botocore's own errors, ValueError, RuntimeError.  All
that this package asks of a store goes through such a file system, and through the files that it opens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Self

from mbridge_fsdp_ckpt.errors import StoreClientError, brief

_AS_THEY_ARE = (OSError, NotImplementedError)  # the latter says that a client has no such call: universal_pathlib asks


class NamingErrors:
    """A client, or a file that it opened: whatever a call raises is an `OSError`, by name.

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
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = found(*args, **kwargs)
            except _AS_THEY_ARE:
                raise
            except Exception as error:
                raise _named(error, self._place) from error
            return NamingErrors(result, self._place) if name == "open" else result

        return call

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._inner.__exit__(*error)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._inner)


def _named(error: Exception, place: str) -> StoreClientError:
    return StoreClientError(f"{brief(error)}, of the client for {place}")

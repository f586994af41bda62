# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Putting something in the place of what the package, or a library, has under a name; or taking it away."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mbridge_fsdp_ckpt import versions
from mbridge_fsdp_ckpt.errors import UnsupportedVersionError
from mbridge_fsdp_ckpt.probes import PROBES, Need


def found(call: str) -> tuple[Any, str]:
    """Who has a name, and the name there.

    Args:
        call: "module:name", or "module:object.name".
    """
    module, _, path = call.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    return owner, name


def patched(call: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A context in which a function is what `make` makes of it.

    Args:
        call: "module:function" or "module:Class.method", as the caller of the function finds it.
        make: Gets the function.
    """
    owner, name = found(call)
    return patch.object(owner, name, make(getattr(owner, name)))


@contextmanager
def gone(call: str) -> Iterator[None]:
    """A context in which a name is not there.

    Args:
        call: "module:name", or "module:object.name".
    """
    owner, name = found(call)
    owner = owner if name in vars(owner) else type(owner)  # a method of an object is its class's
    value = inspect.getattr_static(owner, name)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


def errors_without_each_name(needs: tuple[Need, ...], action: Callable[[], None]) -> dict[str, str]:
    """What an action raises where one name is gone upstream, for each name that these needs look up; "" for nothing."""
    errors = {}
    for need in needs:
        for probe in PROBES[need]:
            for path, _ in map(versions.parse, probe.names.split()):
                with gone(f"{probe.module}:{path}"):
                    errors[f"{probe.module}.{path}"] = _error_of(action)
    return errors


def _error_of(action: Callable[[], None]) -> str:
    versions.forget()
    try:
        action()
    except UnsupportedVersionError as error:
        return error.expected
    finally:
        versions.forget()
    return ""


def unnamed(errors: dict[str, str]) -> list[str]:
    """Names whose absence no error said."""
    return [name for name, said in errors.items() if not said.startswith(f"{name}, which ")]

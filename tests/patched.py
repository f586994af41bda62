"""Putting something in the place of one function of the package, or of a library, named as text."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def patched(call: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A context in which a function is what `make` makes of it.

    Args:
        call: "module:function" or "module:Class.method", as the caller of the function finds it.
        make: Gets the function.
    """
    module, _, path = call.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    return patch.object(owner, name, make(getattr(owner, name)))

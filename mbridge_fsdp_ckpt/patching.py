"""Replacing attributes of other packages, and putting them back."""

from __future__ import annotations

import sys
from typing import Any


class Patches:
    """Replacements that can be undone, in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace one attribute."""
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def replace_everywhere(self, owner: Any, name: str, new: Any) -> None:
        """Replace a module's attribute and every other module's reference to it.

        `from module import name` binds early: who imported the function before we came would keep the old one.
        """
        old = getattr(owner, name)
        for module in list(sys.modules.values()):
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    self.replace(module, attribute, new)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            setattr(*self._undo.pop())

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Replace attributes of foreign objects, and put every one of them back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

_ABSENT: Final = object()


class Patches:
    """A list of replaced attributes that can be undone; as a context, it is at the end of the block.

    An attribute that the owner merely inherited (`torch.Tensor.cpu` lives in a C base class) is deleted
    again on undo instead of being pinned to the owner, so that afterwards the owner is as it was.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; remember what the owner itself held under that name."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, last replaced first.  Calling it again does nothing."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def rebind_everywhere(patches: Patches, replacements: Sequence[tuple[Any, Any]]) -> None:
    """For each pair, replace the first under every name that any loaded module binds to it by the second.

    Patching the defining module alone would miss `from module import original` and `alias = module.original`
    in modules that were imported before.
    """
    for rebinding in rebindings(replacements, sys.modules.values()):
        patches.set(*rebinding)


def rebindings(replacements: Iterable[tuple[Any, Any]], modules: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """(module, name, replacement) wherever a module binds the first of a pair."""
    replacement_of = {id(original): replacement for original, replacement in replacements}
    found = []
    for module in list(modules):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            bound = [(name, value) for name, value in list(names.items()) if id(value) in replacement_of]
            found += [(module, name, replacement_of[id(value)]) for name, value in bound]
    return found

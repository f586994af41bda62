"""Whether a module or a buffer has come to any module since somebody looked: torch tells of each as it is registered.

It tells of none that is deleted, nor of what is put into a module's dictionaries directly: who relies on it alone
would miss those.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)


class _Registrations:
    count = 0


def registrations() -> int:
    """So many there have been since this was first asked; another thread may be adding to them."""
    _watch()
    return _Registrations.count


@cache
def _watch() -> None:
    """Parameters are not watched: Megatron-FSDP registers each of them twice in a step."""
    register_module_module_registration_hook(_came)
    register_module_buffer_registration_hook(_came_or_is_new)


def _came(module: Any, name: str, child: Any) -> None:
    _Registrations.count += 1


def _came_or_is_new(module: Any, name: str, buffer: Any) -> None:
    """A tensor that takes another one's place is none: routers put one there in every step."""
    if module._buffers.get(name) is None or buffer is None:
        _came(module, name, buffer)

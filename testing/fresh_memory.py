# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Memory that nothing has written holds NaN while a case runs: whatever reads it shows at once.

torch fills its own new tensors if asked to (all bits set for integers it cannot hold NaN in: the largest number).
What NumPy and the kernel hand out for reading and staging gets bytes of 0xFF, which are NaN in every floating-point
dtype.  A separate process, such as the writer of asynchronous saves, does as it always does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from mbridge_fsdp_ckpt.patching import Patches

_UNWRITTEN = 0xFF
_RANGES, _STAGING = "mbridge_fsdp_ckpt.io.ranges", "mbridge_fsdp_ckpt.saving.background.memory"

_active = Patches()


def fill_with_nan() -> None:
    """Begin; modules that a case imports later than this keep their memory as it comes.  A second call does nothing."""
    restore()
    torchs_own: Any = torch.utils.deterministic
    torchs_own.fill_uninitialized_memory = True
    _set_deterministic(True)
    ranges: Any = sys.modules.get(_RANGES)
    if ranges is not None:
        for kind in (ranges.Scratch, ranges.Arena):
            _active.set(kind, "take", _filled(kind.take))
        _active.set(ranges.OpenFiles, "read", _into_scratch(ranges.OpenFiles.read, ranges.Scratch))
    staging: Any = sys.modules.get(_STAGING)
    if staging is not None:
        _active.set(staging.Staging, "create", classmethod(_filled_staging(staging.Staging.create.__func__)))


def restore() -> None:
    """End.  Calling it again does nothing."""
    _active.undo()
    if torch.are_deterministic_algorithms_enabled():
        _set_deterministic(False)


def _set_deterministic(wanted: bool) -> None:
    """As `torch.use_deterministic_algorithms` does, which imports the compiler to tell it."""
    torch._C._set_deterministic_algorithms(wanted, warn_only=wanted)
    compiler: Any = sys.modules.get("torch._inductor.config")
    if compiler is not None:
        compiler.deterministic = wanted


def _filled(take: Callable[..., Any]) -> Callable[..., Any]:
    """Memory for reads: what is left from the read before is gone, too."""

    def taken(self: Any, length: int) -> Any:
        memory = take(self, length)
        memory.fill(_UNWRITTEN)
        return memory

    return taken


def _into_scratch(read: Callable[..., Any], make: Callable[[], Any]) -> Callable[..., Any]:
    """Reads without memory of their own get some that is filled."""

    def reading(self: Any, path: Any, offset: int, length: int, hasher: Any = None, scratch: Any = None) -> Any:
        return read(self, path, offset, length, hasher, make() if scratch is None else scratch)

    return reading


def _filled_staging(create: Callable[..., Any]) -> Callable[..., Any]:
    def created(cls: type, slots: int) -> Any:
        staging = create(cls, slots)
        staging.bytes.fill(_UNWRITTEN)
        return staging

    return created

"""What the matrices interfere with is there: a sample seldom comes to the step that a change has renamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.patched import patched
from tests.soak import kill, kill_beside, slow, test_disk

STEPS = {step.name for step in (*kill.STEPS, *kill_beside.OWN_STEPS)}
CALLS = {step if step.startswith("pathlib:") else f"mbridge_fsdp_ckpt.{step}" for step in STEPS}
CALLS |= {call for call, _, _ in test_disk.CALLS} | {slow.COPYING, slow.SAVING}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_what_a_matrix_interferes_with_is_there(call: str) -> None:
    found: list[Callable[..., Any]] = []

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        found.append(function)
        return function

    with patched(call, keep):
        assert callable(found[0])

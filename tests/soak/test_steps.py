# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the matrices interfere with is there: a sample seldom comes to the step that a change has renamed."""

from __future__ import annotations

import pytest

from tests.patched import found
from tests.soak import kill, kill_beside, slow, test_disk

CALLS = {kill.call_of(step.name) for step in (*kill.STEPS, *kill_beside.OWN_STEPS)}
CALLS |= {call for call, _, _ in test_disk.CALLS} | {slow.COPYING, slow.SAVING}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_what_a_matrix_interferes_with_is_there(call: str) -> None:
    owner, name = found(call)
    assert callable(getattr(owner, name, None))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Plain DCP reads what this package saved of a model under FSDP2, and this package what plain DCP saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp2 import cases
from tests.fsdp2.conftest import Worlds
from tests.fsdp2.models import Layout
from tests.fsdp2.test_resume import FSDP, HSDP, TP, unlike


@pytest.mark.parametrize(
    ("layout", "world", "optimizer", "loaded_in", "other"),
    [
        pytest.param(FSDP, 2, "AdamW", FSDP, 2, id="FSDP"),
        pytest.param(FSDP, 2, "SGD momentum", FSDP, 1, id="momentum"),
        pytest.param(FSDP, 2, "AdamW capturable", FSDP, 2, id="capturable"),
        pytest.param(Layout(compiled=True, recomputed=True), 2, "AdamW amsgrad", FSDP, 2, id="compiled"),
        pytest.param(Layout(dim=1, experts=True), 4, "AdamW", HSDP, 4, id="experts"),
        pytest.param(TP, 4, "AdamW", FSDP, 2, id="TP x FSDP"),
    ],
)
def test_both_read_each_others(
    layout: Layout, world: int, optimizer: str, loaded_in: Layout, other: int, worlds: Worlds, tmp_path: Path
) -> None:
    ours, plain = str(tmp_path / "ours"), str(tmp_path / "plain")
    (saved, _), *_ = worlds[world].run(cases.save, ours, layout, optimizer)
    assert unlike(worlds[world].run(cases.save_plainly, plain, layout, optimizer)[0], saved) == []
    for after, _, values in worlds[other].run(cases.load, plain, loaded_in, optimizer):
        assert unlike(saved, after) == []
        assert values == {"step": 2, "schedule": {"last": [0.5, "x"]}}
    ((of_ours, groups), *_), ((of_plain, others), *_) = (
        worlds[other].run(cases.load_plainly, directory, loaded_in, optimizer) for directory in (ours, plain)
    )
    state_of_unused = {name for name in of_plain if ".unused." in name}  # plain DCP makes some where there is none
    known = {name: value for name, value in of_ours.items() if name not in state_of_unused}
    assert unlike(known, {name: value for name, value in saved.items() if name not in state_of_unused}) == []
    assert unlike(known, {name: value for name, value in of_plain.items() if name not in state_of_unused}) == []
    assert groups == others
    (keys, *_), (theirs, *_) = (worlds[other].run(cases.keys_of_plain, directory) for directory in (ours, plain))
    assert {key for key in theirs if ".unused." not in key} - {"schedule.last"} == {
        key for key in keys if ".unused." not in key
    }

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Runs that say `fsdp_dtensor` and are saved by this package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import ConfigurationError
from testing.ranks import RankPool, no_process_group
from tests.bridge.training import Run, train
from tests.run_directories import as_it_was

pytestmark = pytest.mark.bridge


def test_a_stock_run_goes_on_by_takeover_and_then_again_by_stock(bridge_ranks: RankPool, tmp_path: Path) -> None:
    stock = Run(str(tmp_path / "whole"), format="fsdp_dtensor", iterations=6)
    whole = bridge_ranks.run(train, stock, ranks=2)
    place = as_it_was(tmp_path / "whole", tmp_path / "again")
    taken_over = stock.on(directory=place, takeover=True, iterations=4)
    for through, again in zip(whole, bridge_ranks.run(train, taken_over, ranks=2), strict=True):
        assert again["losses"] == {step: through["losses"][step] for step in (3, 4)}
        assert again["saves"] == [{}], "a save issues no collective"
    saved_here = {path.name: (path / "manifest.json").is_file() for path in Path(place).glob("iter_*")}
    assert saved_here == {"iter_0000002": False, "iter_0000004": True}
    for through, again in zip(whole, bridge_ranks.run(train, stock.on(directory=place), ranks=2), strict=True):
        assert again["losses"] == {step: through["losses"][step] for step in (5, 6)}
        assert again["end"] == through["end"]
    assert not (Path(place) / "iter_0000006" / "manifest.json").exists()


@no_process_group
def resumed(run: Run) -> dict[str, Any]:
    """What a run loads, and whether the load puts generators back."""
    from mbridge_fsdp_ckpt.integrations.common.restoration import generators

    put_back = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        set_generators = generators(*args, **kwargs)

        def restore() -> None:
            torch.rand(1)
            drawn = torch.get_rng_state()
            set_generators()
            put_back.append(not torch.equal(drawn, torch.get_rng_state()))

        return restore

    with patch("mbridge_fsdp_ckpt.integrations.bridge.restoration.generators", watched):
        found = train(run)
    return {"loaded": found["loaded"], "losses": list(found["losses"]), "put back": put_back}


def test_an_iteration_directory_is_loaded_as_it_is_and_random_states_fit_their_layout_alone(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    """As Bridge's tests want it of stock: no tracker is asked, and RNG state is ignored when TP changes."""
    stock = Run(str(tmp_path / "whole"), format="fsdp_dtensor", iterations=2, tensor=2)
    whole = bridge_ranks.run(train, stock, ranks=2)
    place = tmp_path / "whole" / "iter_0000002"
    for tracker in ("latest_checkpointed_iteration.txt", "latest_train_state.pt"):
        (place / tracker).write_text("no tracker")
    run = stock.on(directory=str(tmp_path / "again"), takeover=True, iterations=3, save_every=9)
    run = run.on(config={"checkpoint.load": str(place)})
    for tensor, fits in ((2, True), (1, False)):
        for through, again in zip(whole, bridge_ranks.run(resumed, run.on(tensor=tensor), ranks=2), strict=True):
            assert again == {"loaded": through["end"], "losses": [3], "put back": [fits]}


@no_process_group
def who_is_ours(environment: dict[str, str], chosen: bool | None) -> dict[str, Any]:
    from mbridge_fsdp_ckpt.integrations.bridge.choice import is_ours

    mbridge_fsdp_ckpt.unregister()
    formats = ("fsdp_dtensor", "fsdp_dtensor_safe", "torch_dist")
    with patch.dict(os.environ, environment):
        try:
            mbridge_fsdp_ckpt.register(takeover=chosen)
            registered = [name for name in formats if is_ours(name)]
            mbridge_fsdp_ckpt.register()
            again = [name for name in formats if is_ours(name)]
        except ConfigurationError as error:
            return {"error": str(error)}
        finally:
            mbridge_fsdp_ckpt.unregister()
    return {"registered": registered, "again": again, "after": [name for name in formats if is_ours(name)]}


@pytest.mark.parametrize(
    ("variable", "chosen", "taken"),
    [(None, None, False), ("0", None, False), ("1", None, True), ("1", False, False), (None, True, True)],
)
def test_who_asks_for_a_takeover(variable: str | None, chosen: Any, taken: bool, bridge_ranks: RankPool) -> None:
    environment = {} if variable is None else {"MBRIDGE_FSDP_CKPT_TAKEOVER": variable}
    ours = ["fsdp_dtensor", "fsdp_dtensor_safe"] if taken else ["fsdp_dtensor_safe"]
    expected = {"registered": ours, "again": ours, "after": ["fsdp_dtensor_safe"]}
    assert bridge_ranks.run(who_is_ours, environment, chosen, ranks=1) == [expected]


def test_another_value_of_the_variable_is_refused(bridge_ranks: RankPool) -> None:
    (result,) = bridge_ranks.run(who_is_ours, {"MBRIDGE_FSDP_CKPT_TAKEOVER": "yes"}, None, ranks=1)
    assert "MBRIDGE_FSDP_CKPT_TAKEOVER to be 0 or 1" in result["error"]
    assert "'yes'" in result["error"]

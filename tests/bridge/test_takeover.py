"""Runs that say `fsdp_dtensor` and are saved by this package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.testing.ranks import RankPool, no_process_group
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
def who_is_ours(environment: dict[str, str], chosen: bool | None) -> dict[str, Any]:
    from mbridge_fsdp_ckpt.bridge.plugin import is_ours

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

"""State besides tensors, under Bridge: checked before a load changes anything; old checkpoints: most_recent_k."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.testing.ranks import RankFailed, RankPool
from tests.bridge.training import Run, train

pytestmark = pytest.mark.bridge


def test_most_recent_k_keeps_the_newest_and_what_a_restart_begins_from(bridge_ranks: RankPool, tmp_path: Path) -> None:
    bridge_ranks.run(train, Run(str(tmp_path), save_every=1, config={"checkpoint.most_recent_k": 2}), ranks=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]
    back = {"checkpoint.most_recent_k": 0, "checkpoint.ckpt_step": 3}
    bridge_ranks.run(train, Run(str(tmp_path), 5, save_every=1, config=back), ranks=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000005"]


def test_another_schedule_is_refused_by_name(bridge_ranks: RankPool, tmp_path: Path) -> None:
    bridge_ranks.run(train, Run(str(tmp_path), iterations=2), ranks=2)
    other = Run(str(tmp_path), config={"optimizer.min_lr": 1e-7, "scheduler.override_opt_param_scheduler": False})
    with pytest.raises(RankFailed) as caught:
        bridge_ranks.run(train, other, ranks=2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert re.search(r"ConfigurationError: \[rank [01] on ", text), "the first to fail speaks"
        assert "minimum learning rate" in text
        assert "override_opt_param_scheduler" in text


def restore_from(change: dict[str, Any]) -> dict[str, Any]:
    """Try RNG states of which some are not what this process has; what was said, and whether a generator moved."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mbridge_fsdp_ckpt.hosts.restoration import generators

    good: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    random.random(), np.random.random(), torch.rand(1)
    before = random.getstate(), torch.get_rng_state(), _position()
    changed = good | change
    states = {name: value for name, value in changed.items() if value is not None}
    record = SimpleNamespace(values={"rng_state": {"(0, 0)": [states]}})
    loaded = SimpleNamespace(topology={}, nearest=record)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(pp=group, tp=group, dp=group)
    error = ""
    try:
        put_in_place = generators(loaded, groups, one_a_data_rank=False, remedy="Leave them out.")
    except ManifestError as caught:
        error = str(caught)
    else:
        put_in_place()
    after = random.getstate(), torch.get_rng_state(), _position()
    moved = before[0] != after[0] or not torch.equal(before[1], after[1]) or before[2] != after[2]
    back = random.getstate() == good["random_rng_state"] and torch.equal(torch.get_rng_state(), good["torch_rng_state"])
    return {"error": error, "moved": moved, "back": back}


def _position() -> Any:
    state: Any = np.random.get_state()
    return state[2]


BAD: dict[str, Any] = {
    "random_rng_state": (3, (1, 2, 3), None),
    "np_rng_state": ("PCG64", np.zeros(3), 0, 0, 0.0),
    "torch_rng_state": torch.zeros(7, dtype=torch.uint8),
    "cuda_rng_state": "text",
    "rng_tracker_states": 3,
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("missing", [False, True])
def test_generators_of_another_kind_are_refused_before_any_is_set(
    name: str, missing: bool, bridge_ranks: RankPool
) -> None:
    [seen] = bridge_ranks.run(restore_from, {name: None if missing else BAD[name]}, ranks=1)
    assert "RNG states as Megatron saves them" in seen["error"]
    assert not seen["moved"]


def test_generators_are_set_back(bridge_ranks: RankPool) -> None:
    assert bridge_ranks.run(restore_from, {}, ranks=1) == [{"error": "", "moved": True, "back": True}]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""State besides tensors, under Bridge: checked before a load changes anything; old checkpoints: most_recent_k."""

from __future__ import annotations

import random
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mbridge_fsdp_ckpt.errors import ManifestError
from testing.ranks import RankFailed, RankPool
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


BAD: dict[str, Any] = {
    "random_rng_state": (3, (1, 2, 3), None),
    "np_rng_state": ("PCG64", np.zeros(3), 0, 0, 0.0),
    "torch_rng_state": torch.zeros(7, dtype=torch.uint8),
    "cuda_rng_state": "text",
    "rng_tracker_states": 3,
}
CHANGES: list[dict[str, Any]] = [{name: value} for name, bad in BAD.items() for value in (bad, None)]


@dataclass(frozen=True)
class Place:
    """A data-parallel rank, whether each draws its own numbers, and how many states were saved."""

    one_each: bool
    rank: int
    ranks: int
    saved: int


PLACES: dict[Place, int | None] = {
    Place(False, 0, 1, 1): 0,
    Place(False, 1, 2, 1): 0,
    Place(True, 1, 2, 2): 1,
    Place(True, 0, 2, 1): 0,
    Place(True, 1, 2, 1): None,
    Place(True, 2, 4, 2): None,
}
"""And whose states it gets; None where its generators stay as they are."""


def states(seed: int) -> dict[str, Any]:
    """As Megatron saves them, of generators that started with a seed."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    of_torch = torch.Generator().manual_seed(seed).get_state()
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": of_torch,
        "cuda_rng_state": of_torch,  # the stand-in for CUDA draws from the same generator
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def restore_each(changes: list[dict[str, Any]], places: list[Place]) -> tuple[list[tuple[str, bool]], list[Any]]:
    """Try states of which one is not what this process has: what was said, and whether a generator moved.

    Then good states, at each place: whose this process got, and what was said.
    """
    refused = []
    for change in changes:
        changed = {name: value for name, value in (states(0) | change).items() if value is not None}
        seed_all()
        try:
            generators_at(Place(False, 0, 1, 1), [changed])()
        except ManifestError as caught:
            refused.append((str(caught), standing() != standing_of(SEED)))
    got = []
    for place in places:
        seed_all()
        with redirect_stdout(StringIO()) as said:
            generators_at(place, [states(index) for index in range(place.saved)])()
        owners = {SEED: None, **{index: index for index in range(place.saved)}}
        got.append(([owner for seed, owner in owners.items() if standing() == standing_of(seed)], said.getvalue()))
    return refused, got


SEED = 99  # of the run


def generators_at(place: Place, saved: list[Any]) -> Any:
    from mbridge_fsdp_ckpt.integrations.common.restoration import generators

    record = SimpleNamespace(values={"rng_state": {"(0, 0)": saved}})
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    data = SimpleNamespace(rank=lambda: place.rank, size=lambda: place.ranks)
    groups = SimpleNamespace(pp=alone, tp=alone, dp=data)
    loaded = SimpleNamespace(topology={}, nearest=record)
    return generators(loaded, groups, one_a_data_rank=place.one_each, remedy="Leave them out.")


def seed_all() -> None:
    random.seed(SEED), np.random.seed(SEED), torch.manual_seed(SEED)


def standing() -> tuple[float, float, float]:
    """The next number of each generator, which stays where it is."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found = random.random(), float(np.random.rand()), float(torch.rand(1))
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    return found


def standing_of(seed: int) -> tuple[float, float, float]:
    numbers = torch.rand(1, generator=torch.Generator().manual_seed(seed))
    return random.Random(seed).random(), float(np.random.RandomState(seed).rand()), float(numbers)


def test_generators_are_set_or_refused_before_any_is(bridge_ranks: RankPool) -> None:
    """Those of data-parallel ranks beyond the saved ones stay as seeded, as stock leaves them, and that is said."""
    [(refused, got)] = bridge_ranks.run(restore_each, CHANGES, list(PLACES), ranks=1)
    assert len(refused) == len(CHANGES)
    assert all("RNG states as Megatron saves them" in error and not moved for error, moved in refused)
    assert [owners for owners, _ in got] == [[owner] for owner in PLACES.values()]
    said = ["generators of the others stay as seeded" in text for _, text in got]
    assert said == [place.one_each and place.ranks > place.saved for place in PLACES]

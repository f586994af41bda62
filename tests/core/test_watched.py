# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Models that change otherwise than by training: between saves, and between the call of one and its copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import watched

STRATEGIES = "no_shard", "optim", "optim_grads", "optim_grads_params"


def test_whatever_changes_between_saves_the_next_one_has_it(megatron_ranks: RankPool, tmp_path: Path) -> None:
    both = megatron_ranks.run(watched.between_saves, str(tmp_path), ranks=2)
    assert both[0] == both[1]
    failed = {what: outcome for what, outcome in both[0].items() if outcome != [None, True]}
    assert failed == {"a parameter is replaced": ["ConfigurationError", "module.module.decoder.final_layernorm.weight"]}
    assert len(both[0]) == 11


def test_what_changes_between_call_and_copy_fails_the_save_or_is_not_part_of_it(
    megatron_ranks: RankPool, tmp_path: Path
) -> None:
    both = megatron_ranks.run(watched.between_call_and_copy, str(tmp_path), ranks=2)
    assert both[0] == both[1]
    found, good = both[0], [None, True]
    for what in ("a buffer", "a module"):
        assert found.pop(what) == [*good, True, True, good], what
    told = {}
    assert {what: len(outcome) for what, outcome in found.items()} == dict.fromkeys(found, 7)
    for what, (error, key, rank, told[what], stands, is_there, after) in found.items():
        assert (error, stands, is_there, after) == ("ChangedTensorError", True, False, good), what
        assert rank in (0, 1)
        assert key
    assert told.pop("a slot that is another one") == "another one in its place"
    assert set(told.values()) == {"that it was changed in place 1 times, it or one that shares its memory"}
    assert len(told) == 5


def test_a_call_waits_for_the_copy_where_steps_may_be_replayed(megatron_ranks: RankPool, tmp_path: Path) -> None:
    [found] = megatron_ranks.run(watched.replayed, str(tmp_path), ranks=1)
    assert found == {
        "not captured": False,
        "configured": True,
        "stepped, weights alone": False,
        "captured, weights alone": True,
        "put back": False,
        "capturable": True,
    }


@pytest.mark.parametrize("instances", [1, 2])
def test_training_changes_nothing_that_is_watched(instances: int, megatron_ranks: RankPool) -> None:
    """Gradients are zeroed and reduced, weights gathered: counters of flat buffers and what shares them stand."""
    strategies = STRATEGIES if instances == 1 else STRATEGIES[-1:]
    recipes = [Recipe(layers=1, experts=2, strategy=strategy, instances=instances) for strategy in strategies]
    recipes += [recipes[-1].on(offload=0.5), recipes[-1].on(optimizer="auto")]
    for found in megatron_ranks.run(watched.trains, recipes, ranks=2):
        assert {recipe: changed for recipe, (_, changed) in found.items() if changed} == {}
        assert all(count > 20 for count, _ in found.values())
        assert len(found) == len(recipes)

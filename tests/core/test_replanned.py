# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A model is planned once for all its saves; anew, where anything has changed that the plan was made from."""

from __future__ import annotations

from testing.ranks import RankPool
from tests.core import replanned


def test_a_later_save_plans_nothing_and_sees_what_tensors_have_become(megatron_ranks: RankPool) -> None:
    (found,) = megatron_ranks.run(replanned.again, ranks=1)
    assert found["first"] == (1, found["tensors"])
    assert found["later"] == (0, 0)
    assert found["state dicts"] == 2, "one to look, one to plan"
    assert found["same"]
    assert found["counter"] == ("float64", [1.0, 1.0])
    assert 0.125 in found["rates"]
    before, after = found["parameters"]
    assert after == before - 1
    assert found["in the end"] == 1


def test_a_save_has_the_param_groups_that_its_call_saw(megatron_ranks: RankPool) -> None:
    (found,) = megatron_ranks.run(replanned.regrouped, ranks=1)
    assert found == {"said": True, "hyperparameters": True}


def test_tensors_are_found_without_a_state_dict_whichever_are_in_their_modules(megatron_ranks: RankPool) -> None:
    """Megatron-FSDP swaps what computes for what is updated, and back."""
    (found,) = megatron_ranks.run(replanned.found_again, ranks=1)
    assert found == {"first": True, "computes": True, "later": True}


def test_whatever_changes_in_a_model_is_planned_anew_once(megatron_ranks: RankPool) -> None:
    (found,) = megatron_ranks.run(replanned.changed, ranks=1)
    refused = {what: error for what, (_, error) in found.items() if error}
    assert refused == {"a mark of fusion": "FamilyError", "a slice": "LayoutError"}
    assert {what: times for what, (times, _) in found.items()} == dict.fromkeys(found, 1)
    assert len(found) == 18

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The file on the page about ms-swift, executed as a plug-in of ms-swift's with one module standing in for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.modules import MEGATRON_MODULES
from testing.ranks import Died, RankPool
from testing.templates import Templates
from tests.docs import swift_ranks
from tests.patience import patient_ranks

GENERATORS = ("python", "numpy", "torch", "cuda", "tracked")


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    """Two ranks that may die."""
    yield from patient_ranks(templates, ("megatron.core",), MEGATRON_MODULES, ranks=2)


def test_a_run_that_is_killed_in_a_save_resumes_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    folder, tracker = tmp_path / "checkpoint", tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    folder.mkdir()
    whole = pool.run(swift_ranks.trained, str(folder))
    assert tracker.read_text() == "2"
    assert [rank["returned"] for rank in whole] == [False, False], "nothing is still being written"

    assert all(isinstance(rank, Died) for rank in pool.run(swift_ranks.killed, str(folder), may_die=(0, 1)))
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000002"]
    assert list(folder.glob(".staging-iter_0000003-*/manifest.json")), "the save was complete but for its commit"
    assert tracker.read_text() == "2"

    for rank, again in zip(whole, pool.run(swift_ranks.resumed, str(folder)), strict=True):
        assert again["returned"] == 2
        assert again["loaded"] == rank["saved"]
        assert again["losses"] == rank["losses"]
        assert again["end"] == rank["end"]
        check_weights_alone(again, rank["saved"])
        assert again["missing"].startswith("NotACheckpointError: ")
        assert again["stateless"].startswith("KeyMismatchError: ")
    assert whole[0]["saved"]["python"] != whole[1]["saved"]["python"], "each rank has its own"
    assert whole[0]["end"] != whole[0]["saved"]


def check_weights_alone(again: dict[str, Any], saved: dict[str, Any]) -> None:
    """With `--finetune true`, and of a checkpoint of weights with `--no_load_optim true`."""
    weights = {key: value for key, value in saved["tensors"].items() if key.startswith("model.")}
    assert weights != again["before"]["tensors"]
    assert again["fine-tuned"] == (0, {**again["before"], "tensors": weights})
    assert again["weights"] == (2, {**again["before"], "tensors": weights, "samples": saved["samples"]})


def test_random_states_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    (alone,) = pool.run(swift_ranks.saved_alone, str(tmp_path), ranks=1)
    for _, after in pool.run(swift_ranks.in_another_layout, str(tmp_path), 1):
        assert after == alone, "a rank that was not there gets those of the one that was"
    for before, after in pool.run(swift_ranks.in_another_layout, str(tmp_path), 2):
        assert after == {**alone, **{name: before[name] for name in GENERATORS}}, "none fits two tensor-parallel ranks"
        assert all(before[name] != alone[name] for name in GENERATORS)


def test_what_is_not_ours_goes_to_ms_swift(pool: RankPool, tmp_path: Path) -> None:
    (found,) = pool.run(swift_ranks.passed_on, str(tmp_path), ranks=1)
    save, swifts_save, load, swifts_load = found["same"]
    assert (save, load) == (swifts_save, swifts_load)
    assert found["saves"] == [
        ("ms-swift's save", ["model"], 1, 2, 3, "here", True),
        ("ms-swift's save", ["model"], 1, 2, 3, "here", False),
        ("ms-swift's save", [], 1, 2, 3, "here", False),
    ]
    assert found["loads"] == [("ms-swift's load", ["model"], 1, 2, "mcore_model", "default")] * 3
    for option, errors in zip(("async_save", "fp16"), found["refused"], strict=True):
        assert all(error.startswith("ConfigurationError: ") and f"--{option} true" in error for error in errors)

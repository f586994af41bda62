# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`--async-save`: `megatron.training`'s own loop goes on while a checkpoint is written, and hears when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import oracle
from tests.megatron_lm.running import pretrain
from tests.run_directories import as_it_was

pytestmark = pytest.mark.bridge  # Transformer Engine and megatron.training come with the full installation

SAFE = "fsdp_dtensor_safe"
TRACKER = "latest_checkpointed_iteration.txt"
STEPS = [f"iter_{step:07}" for step in range(1, 5)]


@pytest.fixture(scope="module")
def twins(training_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """The same four iterations with four saves, the second time asynchronously; what that said."""
    at_once, beside = tmp_path_factory.mktemp("at_once"), tmp_path_factory.mktemp("beside")
    for result in training_ranks.run(pretrain, SAFE, str(at_once), 4, ranks=2, save_every=1):
        assert result["code"] == 0, result["out"]
    more = "--async-save", "--log-progress"
    results = training_ranks.run(pretrain, SAFE, str(beside), 4, *more, ranks=2, save_every=1)
    for result in results:
        assert result["code"] == 0, result["out"]
    return at_once, beside, [result["out"] for result in results]


def test_each_is_what_a_save_at_once_would_have_been(twins: tuple[Path, Path, list[str]]) -> None:
    at_once, beside, _ = twins
    for step in STEPS:
        assert (beside / step / "manifest.json").is_file()
        assert oracle.on_disk(beside / step) == oracle.on_disk(at_once / step)
    assert (beside / TRACKER).read_text() == "4"


def test_every_commit_is_told_once_and_after_its_beginning(twins: tuple[Path, Path, list[str]]) -> None:
    _, beside, said = twins
    lines = [line.split("\t")[3] for line in (beside / "progress.txt").read_text().splitlines()]
    saves = [line for line in lines if "async checkpoint" in line]
    assert sorted(saves) == ["Saved async checkpoint"] * 4 + ["Saving async checkpoint"] * 4
    begun = [saves[:number].count("Saving async checkpoint") for number in range(9)]
    ended = [saves[:number].count("Saved async checkpoint") for number in range(9)]
    assert all(first >= then for first, then in zip(begun, ended, strict=True))
    for step in range(1, 5):
        assert said[0].count(f"successfully saved checkpoint from iteration {step:7d}") == 1


def test_a_run_resumes_from_it_asynchronously(
    twins: tuple[Path, Path, list[str]], training_ranks: RankPool, tmp_path: Path
) -> None:
    at_once, beside, _ = twins
    place = as_it_was(beside, tmp_path)
    stocks_own = "--async-save", "--use-persistent-ckpt-worker"  # without which stock would not save so
    for result in training_ranks.run(pretrain, SAFE, place, 4, *stocks_own, ranks=2):
        assert result["code"] == 0, result["out"]
    assert (tmp_path / TRACKER).read_text() == "4"
    assert oracle.on_disk(tmp_path / "iter_0000004") == oracle.on_disk(at_once / "iter_0000004")


@pytest.mark.parametrize("iterations", [1, 3], ids=["at the end", "at the next save"])
def test_a_save_that_fails_is_the_same_error_on_all_ranks(
    iterations: int, training_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / TRACKER).mkdir()  # it cannot be replaced, which rank 0 finds after the commit
    more = ("--async-save",)
    results = training_ranks.run(pretrain, SAFE, str(tmp_path), iterations, *more, ranks=2, save_every=1, load=False)
    for result in results:
        assert result["code"] == 1
        assert "StorageError: [rank 0 on " in result["out"]
        assert "The checkpoint is complete and in its place" in result["out"]
        assert ("The previous save has failed, too" in result["out"]) == (iterations > 1)
        assert "successfully saved" not in result["out"]
    made = ["iter_0000001"] if iterations == 1 else ["iter_0000001", "iter_0000002"]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == made


def test_checkpoints_between_the_retained_ones_go(training_ranks: RankPool, tmp_path: Path) -> None:
    more = "--async-save", "--save-retain-interval", "2"
    for result in training_ranks.run(pretrain, SAFE, str(tmp_path), 3, *more, ranks=2, save_every=1):
        assert result["code"] == 0, result["out"]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003"]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`checkpoint.async_save=True`: VeRL goes on while a checkpoint is written, and its bookkeeping follows the commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.errors import SaveAbandonedError
from mbridge_fsdp_ckpt.integrations.verl.asynchronous import Following
from testing.outcomes import Died
from testing.ranks import RankPool
from tests.core import oracle
from tests.verl import beside_cases, cases
from tests.verl.conftest import RANKS
from tests.verl.tiny import Setup

pytestmark = pytest.mark.bridge

STEPS = 4
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def beside(source: str, tmp_path: Path) -> Setup:
    """A run that saves beside its training, and exports nothing."""
    contents = {"save_contents": ["optimizer", "extra", "model"], "async_save": True}
    return Setup(source, str(tmp_path / "run"), checkpoint=contents, steps=STEPS)


def saved(setup: Setup, number: int) -> Path:
    return Path(setup.directory) / f"global_step_{number}" / "actor"


def tracked(setup: Setup) -> str:
    return (Path(setup.directory) / TRACKER).read_text()


def test_each_is_what_a_save_at_once_would_have_been(beside: Setup, verl_ranks: RankPool) -> None:
    """And the last one is there when the driver has heard of it, which then lets Ray kill the workers."""
    at_once = beside.on(directory=f"{beside.directory}-at-once", checkpoint=beside.checkpoint | {"async_save": False})
    first = verl_ranks.run(beside_cases.train, at_once, STEPS)
    second = verl_ranks.run(beside_cases.train, beside, STEPS)
    assert [rank["end"] for rank in second] == [rank["end"] for rank in first]
    assert tracked(beside) == str(STEPS)
    for number in range(1, STEPS + 1):
        whole, other = (oracle.on_disk(saved(setup, number) / "model" / "dist_ckpt") for setup in (at_once, beside))
        assert whole == other
        assert (saved(beside, number) / "ckpt_contents.json").is_file()


def test_no_more_checkpoints_stay_than_asked_for(beside: Setup, verl_ranks: RankPool) -> None:
    verl_ranks.run(beside_cases.train, beside, STEPS, 1)
    assert [saved(beside, number).exists() for number in range(1, STEPS + 1)] == [False, False, False, True]
    assert [rank["from"] for rank in verl_ranks.run(beside_cases.train, beside, STEPS)] == [STEPS] * RANKS


def test_a_job_killed_before_the_commit_resumes_from_the_one_before(beside: Setup, verl_ranks: RankPool) -> None:
    whole = verl_ranks.run(beside_cases.train, beside.on(directory=f"{beside.directory}-whole"), STEPS)
    died = verl_ranks.run(beside_cases.die_before_the_commit, beside, may_die=range(RANKS))
    assert died == [Died(-9)] * RANKS
    assert tracked(beside) == "1"
    assert saved(beside, 2).exists()
    assert not (saved(beside, 2) / "ckpt_contents.json").exists()
    for through, again in zip(whole, verl_ranks.run(beside_cases.train, beside, STEPS), strict=True):
        assert again["from"] == 1
        assert again["losses"] == {number: through["losses"][number] for number in (2, 3, 4)}
        assert again["end"] == through["end"]


def test_a_tracker_that_cannot_be_written_is_the_same_error_on_all_ranks(beside: Setup, verl_ranks: RankPool) -> None:
    (Path(beside.directory) / TRACKER).mkdir(parents=True)
    results = verl_ranks.run(beside_cases.errors_of_two_saves, beside)
    assert len({tuple(errors) for errors in results}) == 1
    (first, second), *_ = results
    assert first == ""
    assert "IsADirectoryError" in second
    assert "The checkpoint is complete and in its place" in second


def test_what_is_saved_is_copied_before_verl_moves_it(beside: Setup, verl_ranks: RankPool) -> None:
    assert verl_ranks.run(beside_cases.taken_around_a_move, beside) == [(False, True)] * RANKS


def test_the_sft_trainer_saves_at_once(beside: Setup, verl_ranks: RankPool) -> None:
    """It sets its tracker when a save returns."""
    verl_ranks.run(cases.train, beside, 2, (1,))
    assert tracked(beside) == "1"
    directory = Path(beside.directory)
    assert (directory / "global_step_1" / "ckpt_contents.json").is_file()
    assert not (directory.parent / TRACKER).exists()


def test_a_critic_is_saved_at_once_and_sets_no_tracker(beside: Setup, verl_ranks: RankPool) -> None:
    """It would be the actor's, which need not be committed."""
    assert verl_ranks.run(beside_cases.save_a_critic, beside) == [True] * RANKS
    assert not (Path(beside.directory) / TRACKER).exists()


def test_what_verl_never_hands_over_ends_the_save_by_name() -> None:
    """Its export may hang."""
    following = Following(limit=0.1)
    with pytest.raises(SaveAbandonedError, match=r"no export within 0.1 s of the commit"):
        following.after_commit()
    assert following.hand_over(None)
    with pytest.raises(SaveAbandonedError, match="an export that failed"):
        following.after_commit()

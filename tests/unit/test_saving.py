# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What rank 0 lets through to a commit: every tensor once, every file complete, or nothing at all."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coverage.plans import DisputedPlans
from mbridge_fsdp_ckpt.coverage.replicas import DifferingCopies
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, DamagedCheckpointError, PlanDisagreementError
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.live.local_shards import LocalShard
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.keys import Section
from mbridge_fsdp_ckpt.plan.slices import owner
from mbridge_fsdp_ckpt.saving import writer
from mbridge_fsdp_ckpt.saving.commit import Job, Place, say_view_left_out
from mbridge_fsdp_ckpt.saving.snapshot import Prepared, write_plan_of
from mbridge_fsdp_ckpt.saving.write_plan import PlanComparison, WritePlan
from mbridge_fsdp_ckpt.saving.writer import CommitRound, Written
from mbridge_fsdp_ckpt.settings import Settings
from tests.unit.rounds import met
from tests.unit.shards import scalar, shards


def coordination(rank: int) -> Coordination:
    return Coordination("save", rank, 2, 60.0)


def prepared(held: list[LocalShard], sections: tuple[Section, ...] = ("model",)) -> Prepared:
    numbers = [shard for shard in held if shard.is_scalar]
    return Prepared(
        write_plan_of(held, numbers, RankIndex(0, {}, None, {}), {}, sections, {"strategy": "x"}), held, numbers, {}
    )


def write(held: Prepared, place: Place, rank: int, choice: str = "warn") -> Written:
    return writer.write(held.read(), held.elements, place, coordination(rank), choice)


NO_VIEW = Settings(dcp_metadata="never")


Follow = Callable[[], None] | None


def job(target: Path, settings: Settings = NO_VIEW, after_commit: Follow = None) -> Job:
    return Job(target, settings, coordination(0), {"iteration": 10}, None, after_commit)


def save(target: Path, ranks: list[Prepared], settings: Settings = NO_VIEW, after_commit: Follow = None) -> None:
    """All ranks' steps, one after the other."""
    saved(job(target, settings, after_commit), ranks)


def saved(running: Job, ranks: list[Prepared]) -> None:
    """The same of a save that was set up already."""
    plans, choice = [rank.write_plan for rank in ranks], running.settings.replicas
    try:
        place = agreed(running, plans)
        written = [write(rank, place, n, choice) for n, rank in enumerate(ranks)]
        commit = rounds(running, plans, place, written)
        if sums := met(commit)["sums"]:
            met([DifferingCopies(n, own.copies, sums, commit[0].finish, choice) for n, own in enumerate(plans)])
    finally:
        running.clean_up()


def agreed(running: Job, plans: list[WritePlan]) -> Place:
    """Where all write."""
    decided = met([PlanComparison(Outcome(own), running.begin) for own in plans])
    if decided["place"] is not None:
        return decided["place"]
    return met([DisputedPlans(n, own.blocks, decided["sums"], running.begin) for n, own in enumerate(plans)])


def rounds(running: Job, plans: list[WritePlan], place: Place, written: list[Written]) -> list[CommitRound]:
    """The second meeting, of each rank."""
    return [CommitRound(running, own, place, Outcome(one)) for own, one in zip(plans, written, strict=True)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "iter_0000010"


def nothing_was_left(target: Path) -> bool:
    assert removal.wait(30.0)
    return list(target.parent.iterdir()) == []


def test_ranks_that_tile_make_a_checkpoint(target: Path) -> None:
    halves = [shards(0, 6), shards(6, 12)]
    for number, [shard] in enumerate(halves):
        shard.flat.copy_(torch.arange(6.0) + 6 * number)
    save(target, [prepared(half) for half in halves])
    source = open_checkpoint(target)
    chunks = source.chunks(["model.weight"])["model.weight"]
    assert torch.equal(torch.cat([source.read(chunk) for chunk in chunks]), torch.arange(12.0).reshape(4, 3))
    assert source.metadata.values == {"iteration": 10}
    assert source.metadata.topology == {"strategy": "x"}, "rank 0's own"
    assert [path.name for path in target.parent.iterdir()] == ["iter_0000010"]


def test_a_number_has_no_record_of_its_own(target: Path) -> None:
    weights, steps = shards(0, 12), [scalar("optimizer.state.weight.step"), scalar("optimizer.state.bias.step")]
    save(target, [prepared(weights)])
    alone = (target / "__0_0.distcp").stat().st_size
    for step in steps:
        step.flat.fill_(7.0)
    save(target, [prepared(weights + steps)])
    assert (target / "__0_0.distcp").stat().st_size == alone
    source = open_checkpoint(target)
    for step in steps:
        [chunk] = source.chunks([step.key])[step.key]
        assert source.read(chunk).equal(torch.tensor(7.0))


def test_by_default_stocks_view_goes_by_the_number_of_chunks_and_its_absence_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    say_view_left_out.cache_clear()
    monkeypatch.setattr("mbridge_fsdp_ckpt.settings.AUTO_DCP_CHUNKS", 2)
    view = {}
    cases: list[tuple[str, int, Any]] = [
        ("two", 6, "auto"),
        ("four", 4, "auto"),
        ("again", 4, "auto"),
        ("asked", 4, "always"),
    ]
    for name, rows, choice in cases:
        halves = [prepared(shards(0, rows)), prepared(shards(rows, 12))]
        save(tmp_path / name / "iter_0000010", halves, Settings(dcp_metadata=choice))
        view[name] = (tmp_path / name / "iter_0000010" / ".metadata").exists()
    assert view == {"two": True, "four": False, "again": False, "asked": True}
    said = [record.getMessage() for record in caplog.records if "dcp_metadata" in record.getMessage()]
    assert len(said) == 1
    assert all(word in said[0] for word in ("4 chunks", 'dcp_metadata="always"', "repair --stock-view"))


def test_what_is_overwritten_in_place_while_it_is_read_is_a_named_error_and_no_mix(target: Path) -> None:
    """The marker method: each save's files have names of their own, and the older save's are deleted."""
    halves, in_place = [shards(0, 6), shards(6, 12)], Settings(dcp_metadata="never", commit="marker")
    save(target, [prepared(half) for half in halves], in_place)
    source = open_checkpoint(target)
    first, second = source.chunks(["model.weight"])["model.weight"]
    assert source.read(first, verify=False).eq(0).all()
    for [shard] in halves:
        shard.flat.fill_(1.0)
    save(target, [prepared(half) for half in halves], in_place)
    assert removal.wait(30.0)
    assert source.read(first, verify=False).eq(0).all()
    with pytest.raises(DamagedCheckpointError, match="replaced or removed while it was read") as caught:
        source.read(second, verify=False)
    assert caught.value.key == str(second.path)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        pytest.param([shards(0, 6), shards(9, 12)], "no rank holds 3 of 12", id="a hole"),
        pytest.param([shards(0, 9), shards(6, 12)], "ranks 0 and 1", id="an overlap"),
        pytest.param([shards(0, 12), shards(0, 12)], "ranks 0, 1", id="two that hold all of it"),
        pytest.param(
            [shards(0, 6) + shards(6, 12), shards(0, 12)],
            "ranks 0, 1",
            id="two that hold all of it, cut differently",
        ),
    ],
)
def test_a_tensor_that_is_not_held_once_is_named_and_not_committed(
    target: Path, ranks: list[list[LocalShard]], found: str
) -> None:
    with pytest.raises(PlanDisagreementError, match=f"model.weight.*{found}"):
        save(target, [prepared(rank) for rank in ranks])
    assert nothing_was_left(target)


def test_a_rank_that_has_a_key_twice_is_refused() -> None:
    with pytest.raises(PlanDisagreementError, match=r"model\.weight.*several tensors on one rank"):
        prepared(shards(0, 12) + shards(0, 12))


@pytest.mark.parametrize("on_writer", [True, False])
def test_a_tensor_that_one_rank_holds_is_saved_if_it_is_to_write_it(target: Path, on_writer: bool) -> None:
    holder = owner("weight", 2) if on_writer else 1 - owner("weight", 2)
    ranks = [prepared(shards(0, 12, replica=(r, 2)) if r == holder else []) for r in range(2)]
    if on_writer:
        save(target, ranks)
        assert list(open_checkpoint(target).metadata.keys) == ["model.weight"]
    else:
        with pytest.raises(PlanDisagreementError, match=f"model.weight: no rank writes it: rank {holder} hold it"):
            save(target, ranks)
        assert nothing_was_left(target)


def test_ranks_that_save_other_sections_are_refused(target: Path) -> None:
    ranks = [prepared(shards(0, 6)), prepared(shards(6, 12), ("model", "optimizer"))]
    with pytest.raises(ConfigurationError, match="sections"):
        save(target, ranks)
    assert nothing_was_left(target)


@pytest.mark.parametrize(
    ("error", "name"),
    [(OSError(28, "No space left on device"), "StorageError"), (ValueError("no such thing"), "RankFailedError")],
)
def test_what_fails_after_the_commit_says_that_the_checkpoint_stands(target: Path, error: Exception, name: str) -> None:
    seen: list[bool] = []

    def fail() -> None:
        seen.append(has_metadata(target))
        raise error

    for number in (1, 2):
        with pytest.raises(
            CheckpointError, match=f"{re.escape(str(error))}.*The checkpoint is complete and in its place"
        ) as caught:
            save(target, [prepared(shards(0, 12))], after_commit=fail)
        assert type(caught.value).__name__ == name
        assert (caught.value.rank, str(target) in str(caught.value)) == (0, True)
        assert open_checkpoint(target).metadata.values == {"iteration": 10}
        assert removal.wait(30.0)
        assert [path.name for path in target.parent.iterdir()] == ["iter_0000010"]
        assert seen == [True] * number, "in its place when it is followed up"


@pytest.mark.parametrize("name", ["__1_0.distcp", "rank_00001.index"])
def test_a_file_that_was_not_written_completely_is_named_and_not_committed(target: Path, name: str) -> None:
    ranks, running = [prepared(shards(0, 6)), prepared(shards(6, 12))], job(target)
    plans = [rank.write_plan for rank in ranks]
    place = agreed(running, plans)
    staging = Path(place["directory"])
    written = [write(rank, place, number) for number, rank in enumerate(ranks)]
    (staging / name).write_bytes((staging / name).read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError) as caught:
        met(rounds(running, plans, place, written))
    assert caught.value.key == str(staging / name)
    running.clean_up()
    assert nothing_was_left(target)

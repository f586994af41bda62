# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's `checkpoint.async_save`: what is saved, and what follows a save, is as where training waits for it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.opening import open_checkpoint
from testing.ranks import RankFailed, RankPool
from tests.bridge import async_saves
from tests.bridge.training import Run, train
from tests.core import oracle
from tests.run_directories import as_it_was
from tests.soak import sampling

pytestmark = pytest.mark.bridge

STEPS = [1, 2, 3, 4]
ASYNC = {"checkpoint.async_save": True}


def content(root: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint is, apart from where it lies and how it was saved."""
    directory = root / f"iter_{step:07}"
    metadata = open_checkpoint(directory).metadata
    config = (directory / "run_config.yaml").read_text().replace(str(root), "")
    return {
        "tensors": oracle.on_disk(directory),
        "values": str(metadata.values),
        "train state": torch.load(directory / "train_state.pt"),
        "config": [line for line in config.splitlines() if "async_s" not in line and "persistent_ckpt_w" not in line],
    }


def trackers(root: Path) -> tuple[str, dict[str, torch.Tensor]]:
    return (root / "latest_checkpointed_iteration.txt").read_text(), torch.load(root / "latest_train_state.pt")


def scalars(folder: Path) -> dict[str, list[int]]:
    """Iterations of what saves took, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("checkpoint/save")]
    return {tag: [event.step for event in events.Scalars(tag)] for tag in tags}


WORKERS = [{}, {"checkpoint.use_persistent_ckpt_worker": False, "checkpoint.async_strategy": "mcore"}]


@pytest.mark.parametrize("workers", sampling.drawn("asynchronous twins", WORKERS, share=2), ids=str)
def test_an_asynchronous_run_saves_what_its_twin_does(
    workers: dict[str, Any], bridge_ranks: RankPool, tmp_path: Path
) -> None:
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    more: dict[str, Any] = {"logger.log_progress": True, "logger.tensorboard_dir": f"{waits}/board"}
    twin = bridge_ranks.run(train, Run(str(waits), save_every=1, config=more), ranks=2)
    more |= ASYNC | workers | {"logger.tensorboard_dir": f"{beside}/board"}
    run = Run(str(beside), save_every=1, config=more)
    found = bridge_ranks.run(async_saves.train_watched, run, ranks=2)

    for own, other in zip(found, twin, strict=True):
        assert own["losses"] == other["losses"]
        assert own["end"] == other["end"]
        counted = [set(collectives) for collectives in own["saves"]]
        assert len(counted) == 4
        assert set().union(*counted) <= {"all_gather_object"}, "a save issues no collective: that is the callback's"
        assert (own["queues"], own["writer"], own["pending"]) == ([None], None, None)
        assert [len(set(steps)) for steps in own["heard"]] == [1] * 4, "once a save, at the same step on all ranks"
    for step in STEPS:
        assert content(beside, step) == content(waits, step)
    assert trackers(beside) == trackers(waits)
    assert trackers(beside)[0] == "4"
    assert set(map(tuple, scalars(beside / "board").values())) == {tuple(STEPS)}
    progress = [line.split("\t")[3:5] for line in (beside / "progress.txt").read_text().splitlines()[1:]]
    for said in ("Saving", "Saved"):
        expected = [f"Iteration: {step}" for step in STEPS]
        assert [step for what, step in progress if what == f"{said} async checkpoint"] == expected

    resumed = run.on(directory=as_it_was(beside, tmp_path / "resumed"), config=ASYNC)
    for again, through in zip(bridge_ranks.run(train, resumed, ranks=2), twin, strict=True):
        assert again["losses"] == {step: through["losses"][step] for step in (3, 4)}
        assert again["end"] == through["end"]


def test_what_follows_a_save_waits_for_it_and_names_its_step(bridge_ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path / "c"), save_every=1, config={**ASYNC, "logger.tensorboard_dir": str(tmp_path / "board")})
    found = bridge_ranks.run(async_saves.train_held, run, Settings(when_busy="skip"), 3, ranks=2)
    assert sorted(path.name for path in (tmp_path / "c").glob("iter_*")) == ["iter_0000001", "iter_0000004"]
    assert found == [{"heard": [[4, 4], [4, 4]]}] * 2, "nobody hears of saves that were skipped"
    assert set(map(tuple, scalars(tmp_path / "board").values())) == {(1, 4)}
    for step in (1, 4):
        state = torch.load(tmp_path / "c" / f"iter_{step:07}" / "train_state.pt")
        assert (state["step"], state["consumed_train_samples"]) == (step, 8 * step)
    assert trackers(tmp_path / "c")[0] == "4"


def test_callbacks_are_called_at_the_same_step_where_one_rank_hears_late(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    """And `most_recent_k` is obeyed, as it is where nobody does."""
    run = Run(str(tmp_path), iterations=5, config=ASYNC | {"checkpoint.most_recent_k": 2})
    for heard in bridge_ranks.run(async_saves.train_where_one_hears_late, run, ranks=2):
        assert [len(set(steps)) for steps in heard] == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000005"]


HEARD = [(2, "finalize_async_saves"), (3, "save_checkpoint")]


@pytest.mark.parametrize(("iterations", "where"), sampling.drawn("heard of later", HEARD, share=2))
def test_a_save_that_fails_is_the_same_error_on_all_ranks_later(
    iterations: int, where: str, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), iterations, save_every=1, config=ASYNC)
    with pytest.raises(RankFailed) as caught:
        bridge_ranks.run(async_saves.train_with_an_obstacle, run, ranks=2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    errors = set()
    for text in caught.value.tracebacks.values():
        assert f"in {where}" in text
        errors.add(text.strip().splitlines()[-1])
    assert len(errors) == 1
    assert "iter_0000002" in errors.pop()
    assert trackers(tmp_path)[0] == ("1" if where == "finalize_async_saves" else "3"), "the newer one is made first"
    again = bridge_ranks.run(train, Run(as_it_was(tmp_path, tmp_path / "again", 1), 1), ranks=2)
    assert all(result["loaded"] for result in again)


EXITS: dict[str, tuple[dict[str, Any], int | None, int]] = {
    "interval": ({"train.exit_interval": 2}, None, 2),
    "duration": ({"train.exit_duration_in_mins": 1e-9}, None, 1),
    "signal": ({"train.exit_signal_handler": True}, signal.SIGTERM, 2),
}


@pytest.mark.parametrize("name", sampling.drawn("exits", list(EXITS), share=3))
def test_a_run_that_exits_has_its_last_save_first(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    config, sent, last = EXITS[name]
    run = Run(str(tmp_path), save_every=3, config={**ASYNC, **config})
    found = bridge_ranks.run(async_saves.train_until_exit, run, sent, ranks=2)
    assert found == [{"heard": [[last, last]], "writer": None, "pending": None}] * 2
    assert trackers(tmp_path)[0] == str(last)
    assert content(tmp_path, last)["train state"]["step"] == last


def test_a_save_ends_as_it_began_where_training_wants_no_more_of_them(bridge_ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(str(root), save_every=1, config=ASYNC | {"logger.log_progress": True, "checkpoint.most_recent_k": 1})
    heard = bridge_ranks.run(async_saves.train_and_stop_saving, run, ranks=2)
    assert [len(steps) for steps in heard] == [1, 1], "the first save's alone"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert "Saved async checkpoint\tIteration: 1" in (root / "progress.txt").read_text()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What follows a commit under Bridge: trackers on all ranks' account, old checkpoints on nobody's."""

from __future__ import annotations

import concurrent.futures
import errno
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mbridge_fsdp_ckpt.commit import removal
from testing.ranks import RankFailed, RankPool, no_process_group
from tests.bridge.training import Run, configuration, train
from tests.patched import patched

pytestmark = pytest.mark.bridge

STATE = "latest_train_state.pt"
SAVE_PHASES = {"plan", "agree", "write", "flush", "compare", "index", "commit"}
LOAD_PHASES = {"open", "agree", "read", "exchange", "fill", "refresh"}


class Failing:
    """A logger whose server does not answer."""

    def log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("no server")


@no_process_group
def train_with_a_failing_logger(run: Run) -> tuple[list[int], list[str]]:
    """Train while W&B fails on every rank that has loggers; the iterations trained, and what was warned of."""
    from megatron.bridge.training.state import GlobalState

    stock = GlobalState.wandb_logger
    GlobalState.wandb_logger = property(lambda self: Failing() if is_asked_by_us() else None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained = sorted(train(run)["losses"])
    finally:
        GlobalState.wandb_logger = stock
    return trained, [text for one in caught if "logger" in (text := str(one.message))]


def is_asked_by_us() -> bool:
    """Whether our code asks, on the last rank: what Bridge does with a logger that fails is its own affair."""
    return os.environ["RANK"] == "1" and any(frame.function == "log_scalars" for frame in inspect.stack())


@no_process_group
def train_where(run: Run, call: str) -> list[int]:
    """Train while a call fails on rank 0; the iterations trained."""

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            if os.environ["RANK"] == "0":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return fail

    with patched(f"mbridge_fsdp_ckpt.{call}", failing):
        losses = train(run)["losses"]
        assert removal.wait(30.0)
    return sorted(losses)


@dataclass(slots=True)
class Slotted:
    """A value of a configuration that has no dictionary."""

    names: list[str]


def look_and_write_later(directory: Path) -> tuple[bytes, bytes]:
    """What Bridge writes of a configuration, and what we write of it after it changed, in a place of its own.

    The call may make neither dictionaries nor text: training waits there.
    """
    from mbridge_fsdp_ckpt.integrations.bridge.run_files import run_files

    yaml: Any = import_module("yaml")
    config = configuration(Run(str(directory)))
    config.logger.modules_to_filter = filtered = {"one"}  # of a kind that only YAML's own dumper knows
    config.logger.wandb_exp_name = slotted = Slotted(["one"])
    config.to_yaml(str(directory / "expected.yaml"))
    with (
        patched("yaml:SafeDumper.emit", forbidden),
        patched("yaml:CSafeDumper.serialize", forbidden),
        patched("megatron.training.config.container:ConfigContainerBase.to_dict", forbidden),
    ):
        write = run_files(config, {"step": torch.tensor(1)})
    filtered.add("two")
    slotted.names.append("two")
    config.train.train_iters = 12345
    config.model.activation_func = F.gelu
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        beside.submit(write, directory).result()
    written = (directory / "run_config.yaml").read_bytes()
    assert yaml.safe_load(written)["train"]["train_iters"] == 4
    return (directory / "expected.yaml").read_bytes(), written


def forbidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ends a job that makes either in the call."""

    def fail(*_: Any) -> Any:
        raise AssertionError(f"{function.__qualname__} while training waits")

    return fail


def test_the_run_configuration_is_as_of_the_call_but_its_text_is_made_later(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    [(expected, written)] = bridge_ranks.run(look_and_write_later, tmp_path, ranks=1)
    assert written == expected


def test_a_tracker_that_cannot_be_written_is_the_same_error_on_all_ranks(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), iterations=4)
    with pytest.raises(RankFailed) as caught:
        bridge_ranks.run(train_where, run, "commit.trackers:replace_file", ranks=2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "StorageError: [rank 0 on " in text
        assert "No space left on device. The checkpoint is complete and in its place" in text
    assert (tmp_path / "iter_0000002" / "manifest.json").is_file()
    assert not (tmp_path / STATE).exists()


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(bridge_ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path), iterations=3, save_every=1, config={"checkpoint.most_recent_k": 1})
    trained = bridge_ranks.run(train_where, run, "commit.methods:remove", ranks=2)
    assert trained == [[1, 2, 3]] * 2
    assert len(list(tmp_path.glob("iter_*"))) == 3
    bridge_ranks.run(train, run.on(iterations=4), ranks=2)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000004"]


def test_what_saves_and_loads_took_is_in_tensorboard_and_a_failing_logger_ends_no_run(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(str(tmp_path / "c"), config={"logger.tensorboard_dir": str(tmp_path / "first")})
    [(before, nothing), (trained, warned)] = bridge_ranks.run(train_with_a_failing_logger, run, ranks=2)
    assert before == trained == [1, 2, 3, 4]
    assert nothing == [], "the last rank has the loggers"
    said = "wandb_logger does not take what the save took, and the run goes on: ConnectionError: no server"
    assert warned == [said] * 2
    bridge_ranks.run(train, run.on(iterations=6, config={"logger.tensorboard_dir": str(tmp_path / "again")}), ranks=2)

    read = {}
    for name in ("first", "again"):
        events = EventAccumulator(str(tmp_path / name), size_guidance={"scalars": 0})
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("checkpoint/")]
        read[name] = {tag.removeprefix("checkpoint/"): events.Scalars(tag) for tag in tags}
    names = {f"save_{phase}_seconds" for phase in SAVE_PHASES} | {"save_seconds", "save_bytes", "save_gb_per_s"}
    assert set(read["first"]) == names
    loads = {f"load_{phase}_seconds" for phase in LOAD_PHASES} | {"load_seconds", "load_bytes", "load_gb_per_s"}
    assert set(read["again"]) == names | loads
    assert all([event.step for event in events] == [2, 4] for events in read["first"].values())
    assert all([event.step for event in read["again"][name]] == [4] for name in loads)
    sizes = sum(path.stat().st_size for path in (tmp_path / "c" / "iter_0000004").glob("__*_0.distcp"))
    assert [event.value for event in read["first"]["save_bytes"]] == pytest.approx([sizes] * 2)
    assert all(event.value > 0 for event in read["again"]["load_gb_per_s"])

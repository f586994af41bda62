# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Who reads whose checkpoint: progress is what the writer's loop says that it was, or the load says what to set.

What a run goes on from are literals, known from its batches, and numbers that stock's own writer left for torch's own
reader.  Each case has both writers of a framework: stock's, and this package's.
"""

from __future__ import annotations

import io
import itertools
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from testing.outcomes import RankFailed
from testing.ranks import RankPool
from tests.bridge.training import Run
from tests.progress import runs
from tests.progress.runs import GROWING, SAFE, STOCK
from tests.soak import sampling
from tests.verl.tiny import Setup

pytestmark = pytest.mark.bridge

BRIDGE, MEGATRON_LM, VERL = "Bridge", "Megatron-LM", "VeRL"
HOSTS = (BRIDGE, MEGATRON_LM, VERL)
CARRIED, ANEW, REFUSED = "carried over", "begun anew, as was set", "refused, with what to set"
SKIPPED = "2"  # the iteration that both loops skip


@dataclass(frozen=True)
class Written:
    """A checkpoint, and how far its run was.

    Args:
        directory: Its own.
        iteration: That of its run.
        samples: Consumed, skipped, and consumed by validation.
        operations: Floating-point operations.
        counted: Where the schedule stood, in its own unit.
        random: A digest of the state of torch's generator.
    """

    directory: Path
    iteration: int
    samples: tuple[int, int, int]
    operations: float
    counted: int
    random: Any


@dataclass
class Jobs:
    """Runs of all three frameworks, on one rank each."""

    bridge_ranks: RankPool
    training_ranks: RankPool
    verl_ranks: RankPool
    root: Path
    source: str = ""
    kept: dict[tuple[str, str], Written] = field(default_factory=dict)

    def written(self, host: str, kind: str) -> Written:
        """A checkpoint of a framework; each is made once."""
        if (host, kind) not in self.kept:
            self.kept[host, kind] = write(self, host, kind)
        return self.kept[host, kind]

    def bridge(self, run: Run, *, newer: bool = False) -> dict[str, Any]:
        result: dict[str, Any]
        [result] = self.bridge_ranks.run(runs.bridge, run, newer=newer, ranks=1)
        return result

    def megatron_lm(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        result: dict[str, Any]
        [result] = self.training_ranks.run(runs.megatron_lm, *arguments, ranks=1, **named)
        if result["code"]:
            raise RankFailed(result["out"], {0: result["out"]})
        return result

    def setup(self, directory: Path, kind: str = SAFE, **optim: Any) -> Setup:
        """VeRL's; stock's HybridDeviceOptimizer cannot step."""
        if not self.source:
            self.source = str(self.root / "source")
            self.verl_ranks.run(runs.write_model, self.source, ranks=1)
        config = {"ckpt_format": SAFE} if kind == SAFE else {}
        return Setup(
            self.source,
            str(directory),
            mbridge_config=config,
            optimizer="fused",
            layers="dense_layers",
            optim={"use_checkpoint_opt_param_scheduler": True} | optim,
        )

    def verl(self, setup: Setup, steps: int, save_at: tuple[int, ...] = ()) -> dict[str, Any]:
        result: dict[str, Any]
        [result] = self.verl_ranks.run(runs.verl, setup, steps, save_at, ranks=1)
        return result


@pytest.fixture(scope="module")
def jobs(
    bridge_ranks: RankPool,
    training_ranks: RankPool,
    verl_ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Jobs:
    return Jobs(bridge_ranks, training_ranks, verl_ranks, tmp_path_factory.mktemp("progress"))


def write(jobs: Jobs, host: str, kind: str) -> Written:
    """Train and save; the numbers are those that the batches make."""
    root = jobs.root / f"{host} {kind}"
    directory = root / "iter_0000003"
    if host == BRIDGE:
        config = {"train.global_batch_size": 4, "train.iterations_to_skip": [int(SKIPPED)]}
        seen = jobs.bridge(Run(str(root), 3, save_every=3, format=kind, config=config))["seen"]
        state = torch.load(directory / "train_state.pt")
        operations = float(state["floating_point_operations_so_far"])
        return Written(directory, 3, (12, 4, 0), operations, 8, seen["random read"])
    if host == MEGATRON_LM:
        skip = "--iterations-to-skip", SKIPPED
        seen = jobs.megatron_lm(kind, str(root), 3, *GROWING, *skip, load=False)["seen"]
        operations = value_in(directory, "num_floating_point_operations_so_far")
        return Written(directory, 3, (16, 4, 0), operations, 12, seen["random read"])
    seen = jobs.verl(jobs.setup(root, kind), 2, (2,))["seen"]
    return Written(root / "global_step_2" / "model" / "dist_ckpt", 2, (0, 0, 0), 0.0, 2, seen["random read"])


def value_in(directory: Path, name: str) -> Any:
    """A value, read as stock reads it."""
    storage = FileSystemReader(str(directory)).read_metadata().storage_data
    [place] = [place for index, place in storage.items() if index.fqn == name]
    with (directory / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return torch.load(io.BytesIO(file.read(place.length)), weights_only=False)


def placed(written: Written, reader: str, place: Path) -> Path:
    """A copy where the reader's framework looks for its own."""
    name = f"iter_{written.iteration:07}"
    target = place / (f"global_step_{written.iteration}/model/dist_ckpt" if reader == VERL else name)
    shutil.copytree(written.directory, target)
    (place / "latest_checkpointed_iteration.txt").write_text(str(written.iteration))
    return place


def read(jobs: Jobs, reader: str, place: Path, anew: bool) -> dict[str, Any]:
    """What the reader's loop goes on from, where it uses it, with batches of 8 samples."""
    if reader == BRIDGE:
        config = {"checkpoint.finetune": anew, "rng.seed": 7, "checkpoint.save": None}
        found = jobs.bridge(Run(str(place), 5, save_every=3, config=config))
        state, seen = found["progress"], found["seen"]
        samples = state["consumed_train_samples"], state["skipped_train_samples"], state["consumed_valid_samples"]
        return {
            "iteration": state["step"],
            "samples": samples,
            "operations": state["floating_point_operations_so_far"],
            **of_schedule(seen),
        }
    if reader == MEGATRON_LM:
        more = ("--override-opt-param-scheduler", "--seed", "7", *(["--finetune"] if anew else []))
        seen = jobs.megatron_lm(SAFE, str(place), 5, *GROWING, *more)["seen"]
        args = seen["args"]
        samples = args["consumed_train_samples"], args["skipped_train_samples"], args["consumed_valid_samples"]
        return {
            "iteration": args["iteration"],
            "samples": samples,
            "operations": args["num_floating_point_operations_so_far"],
            **of_schedule(seen),
        }
    setup = jobs.setup(place, use_checkpoint_opt_param_scheduler=not anew)
    found = jobs.verl(setup, 4)
    return {"iteration": found["from"], "samples": (0, 0, 0), "operations": 0.0, **of_schedule(found["seen"])}


def of_schedule(seen: dict[str, Any]) -> dict[str, Any]:
    return {"counted": seen["counted"], "random": seen.get("random set")}


def expected(written: Written, writer: str, reader: str) -> dict[str, Any]:
    """What is gone on from: of VeRL's checkpoints a pretraining loop takes weights alone."""
    if writer == VERL != reader:
        return {"iteration": 0, "samples": (0, 0, 0), "operations": 0.0, "counted": 0, "random": None}
    if reader == VERL != writer:  # its steps are those of its tracker, its schedule counts them
        return {
            "iteration": written.iteration,
            "samples": (0, 0, 0),
            "operations": 0.0,
            "counted": 0,
            "random": written.random,
        }
    return {name: getattr(written, name) for name in ("iteration", "samples", "operations", "counted", "random")}


REMEDIES = {
    BRIDGE: "checkpoint.finetune=True",
    MEGATRON_LM: "--finetune",
    VERL: "optim.use_checkpoint_opt_param_scheduler=False",
}


def refusal(run: Callable[[], Any]) -> str:
    with pytest.raises(RankFailed) as caught:
        run()
    return "".join(caught.value.tracebacks.values())


def test_who_reads_whose_checkpoint(jobs: Jobs) -> None:
    begin, outcomes = time.monotonic(), list[tuple[str, str]]()
    for writer, reader in sampling.drawn("progress", list(itertools.product(HOSTS, HOSTS)), share=9):
        for kind in (STOCK, SAFE):
            saved = jobs.written(writer, kind)
            place = placed(saved, reader, jobs.root / f"{writer}, {kind}, by {reader}")
            pair, refused = f"{writer}'s {kind}, read by {reader}", (writer == VERL) != (reader == VERL)
            if refused:
                assert REMEDIES[reader] in refusal(partial(read, jobs, reader, place, anew=False)), pair
                outcomes.append((pair, REFUSED))
            found = read(jobs, reader, place, anew=refused)
            assert found == expected(saved, writer, reader), (pair, sampling.how_to_repeat())
            outcomes.append((pair, ANEW if refused else CARRIED))
        ours, stocks = jobs.written(writer, SAFE), jobs.written(writer, STOCK)
        assert ours.operations == stocks.operations
        assert ours.random == stocks.random
    found = sampling.tally(outcomes)
    print(f"progress: {found}; {sampling.how_to_repeat()}")
    sampling.record("progress", sampling.Result(time.monotonic() - begin, found))


def test_an_overridden_schedule_stands_at_the_samples_where_megatron_lm_has_it_so(jobs: Jobs) -> None:
    """From 0.20 on; before, at what it has counted, which is less by the samples that were skipped: see above."""
    place = placed(jobs.written(MEGATRON_LM, SAFE), MEGATRON_LM, jobs.root / "overridden")
    override = "--override-opt-param-scheduler", "--lr", "1e-5"
    found = jobs.megatron_lm(SAFE, str(place), 5, *GROWING, *override, newer=True)
    assert found["seen"]["counted"] == 16
    assert max(rate for rate, *_ in found["applied"][0]) < 1e-5


def test_a_fresh_optimizer_where_none_was_saved_and_bridge_has_it_so(jobs: Jobs) -> None:
    run = Run(str(jobs.root / "no optimizer"), 3, save_every=3)
    jobs.bridge(run.on(config={"train.global_batch_size": 4, "checkpoint.save_optim": False}))
    assert "checkpoint.load_optim=False" in refusal(partial(jobs.bridge, run.on(iterations=5)))
    found = jobs.bridge(run.on(iterations=5), newer=True)
    assert (found["progress"]["step"], found["progress"]["consumed_train_samples"]) == (3, 12)
    assert found["seen"]["counted"] == 0
    assert "was saved without optimizer state (checkpoint.save_optim=False)" in found["said"]

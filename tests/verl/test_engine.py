# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL's own engine and checkpoint manager save and resume in `fsdp_dtensor_safe`, in the setting that hangs (4910)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.outcomes import Died
from testing.ranks import RankPool
from tests.soak import sampling
from tests.upstream import is_before
from tests.verl import cases
from tests.verl.conftest import RANKS
from tests.verl.tiny import ISSUE_4910, Setup, sharded

pytestmark = pytest.mark.bridge

EVERYBODY = range(RANKS)
# Bridge 0.5 takes a sharded parameter's global shape for that of one tensor-parallel rank, when it imports the weights.
TP = 1 if is_before("megatron-bridge", "0.6") else 2
MODELS = list(dict.fromkeys([("language_model", 1), ("language_model", TP), ("value_model", 1)]))
KILLED = [Died(-9)] * RANKS


@pytest.fixture
def setup(source: str, tmp_path: Path) -> Setup:
    return Setup(source, str(tmp_path / "run"))


def verified(directory: Path) -> bool:
    """Whether the tools find nothing wrong with a checkpoint."""
    command = [sys.executable, "-m", "mbridge_fsdp_ckpt"]
    done = [
        subprocess.run([*command, tool, str(directory)], capture_output=True, timeout=120, check=False)
        for tool in ("verify", "inspect")
    ]
    return [run.returncode for run in done] == [0, 0]


def test_where_ranks_see_different_things_none_resumes(setup: Setup, verl_ranks: RankPool, tmp_path: Path) -> None:
    """The SFT trainer looks on each rank for itself; a path that a driver gives may not be there on one host."""
    root, empty = Path(setup.directory), tmp_path / "empty"
    empty.mkdir()
    (root / "global_step_2").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    limited = setup.on(mbridge_config={**setup.mbridge_config, "fsdp_dtensor_safe": {"time_limit": 30}})
    by_rank = verl_ranks.run(cases.resume_where_ranks_see_different_things, limited, str(empty))
    assert by_rank[0] == by_rank[1]
    resume, load = by_rank[0]
    assert "expected all ranks to find the same checkpoint to load" in resume
    assert f"on rank 0 {root}/global_step_2; on rank 1 no checkpoint" in resume
    assert "rank 1" in load
    assert f"{empty}/global_step_2" in load


def numbers(rate: float, decay: float, beta: float) -> list[tuple[float, float, float]]:
    """Of a step: biases and norms do not decay."""
    return [(rate, 0.0, beta), (rate, decay, beta)]


def test_the_first_step_after_a_resume_obeys_the_owner(setup: Setup, verl_ranks: RankPool) -> None:
    """From 1e-3, or 1e-5, to 0 over 20 steps, of which 2 were trained; VeRL's default starts the schedule again."""

    def configured(rate: float, decay: float, beta: float, **more: Any) -> Setup:
        adam = setup_of_issue | {"adam_beta2": beta}
        optim = {"lr": rate, "lr_warmup_steps": 0, "weight_decay": decay, "override_optimizer_config": adam} | more
        return setup.on(optim=optim)

    setup_of_issue: dict[str, Any] = dict(ISSUE_4910)
    default = configured(1e-5, 0.05, 0.9, use_checkpoint_opt_param_scheduler=False)
    as_saved = configured(1e-5, 0.05, 0.9)
    weights = default.on(checkpoint={"load_contents": ["model"]})
    new, old = numbers(1e-5, 0.05, 0.95), numbers(9e-4, 0.1, 0.95)
    expected = [
        (default, True, [new, numbers(9.5e-6, 0.05, 0.95)]),
        (as_saved, True, [old, numbers(8.5e-4, 0.1, 0.95)]),
        (default, False, [new]),
        (as_saved, False, [old]),
        (weights, True, [numbers(1e-5, 0.05, 0.9)]),
    ]
    others = [(run, scheduled) for run, scheduled, _ in expected]
    (found,) = verl_ranks.run(cases.resume_each, configured(1e-3, 0.1, 0.95), 2, others, ranks=1)
    assert found[0] == [numbers(1e-3, 0.1, 0.95), numbers(9.5e-4, 0.1, 0.95)]
    assert [steps[: len(due)] for steps, (*_, due) in zip(found[1:], expected, strict=True)] == [
        due for *_, due in expected
    ]


@pytest.mark.parametrize(("model_type", "tensor"), sampling.drawn("models of VeRL", MODELS, share=3))
@pytest.mark.parametrize("chunks", sampling.drawn("deaths in a save of VeRL", [1, 5], share=2))
def test_a_job_killed_in_a_save_repeats_the_uninterrupted_one_from_the_save_before(
    chunks: int, model_type: str, tensor: int, setup: Setup, verl_ranks: RankPool
) -> None:
    setup = setup.on(model_type=model_type, tensor=tensor)
    whole = verl_ranks.run(cases.train, setup.on(directory=f"{setup.directory}-whole"), 3)
    before = dict(verl_ranks.processes)
    assert verl_ranks.run(cases.die_in_a_save, setup, 2, (1, 2), chunks, may_die=EVERYBODY) == KILLED
    left = Path(setup.directory) / "global_step_2" / "model"
    assert not list((left / "dist_ckpt").iterdir()), "VeRL makes the directory before it saves"
    assert [path for path in left.iterdir() if path.name.startswith(".staging-")]
    resumed = verl_ranks.run(cases.train, setup, 3, (2,))
    assert not set(before.values()) & set(verl_ranks.processes.values()), "the same processes"
    for through, again in zip(whole, resumed, strict=True):
        assert through["optimizer"] == "ShardedHybridDeviceOptimizer"
        assert (through["from"], again["from"], again["position"]) == (0, 1, 1)
        assert again["losses"] == {number: through["losses"][number] for number in (2, 3)}
        assert again["end"] == through["end"]
        assert again["resumed"] != through["resumed"], "nothing was trained before the kill"
    assert any(name.startswith("slot.") and name.endswith("exp_avg") for name in whole[0]["end"])
    assert not [path for path in left.iterdir() if path.name.startswith(".")]


def test_every_combination_of_what_is_saved_and_loaded(setup: Setup, verl_ranks: RankPool) -> None:
    pairs = sampling.drawn("contents of VeRL", list(itertools.product(cases.SUBSETS, cases.SUBSETS)), share=4)
    for wrong in verl_ranks.run(cases.every_combination, setup, pairs, time_limit=400):
        assert wrong == []
    for contents in ("optimizer", "extra", "model+hf_model"):
        assert verified(Path(setup.directory) / contents / "global_step_1" / "model" / "dist_ckpt")


def test_no_more_checkpoints_stay_than_asked_for(setup: Setup, verl_ranks: RankPool) -> None:
    verl_ranks.run(cases.train, setup, 4, (1, 2, 3, 4), 2)
    found = cases.directories(setup)
    assert list(found) == ["global_step_3", "global_step_4"]
    assert all("manifest.json" in files for files in found.values())
    assert verl_ranks.run(cases.train, setup, 4)[0]["from"] == 4
    assert verified(sharded(setup, 4))


def test_the_export_beside_it_is_the_model(setup: Setup, source: str, verl_ranks: RankPool) -> None:
    setup = setup.on(checkpoint={"save_contents": ["model", "hf_model"]})
    verl_ranks.run(cases.export_untrained, setup)
    (original,) = verl_ranks.run(cases.load_export, source, ranks=1)
    (exported,) = verl_ranks.run(cases.load_export, f"{setup.directory}/model/huggingface", ranks=1)
    assert exported["missing"] == exported["unexpected"] == []
    assert exported["logits"].equal(original["logits"])


def test_stock_and_this_format_read_each_other(setup: Setup, verl_ranks: RankPool) -> None:
    """With FusedAdam: stock's HybridDeviceOptimizer cannot step, and with torch's AdamW its save hangs."""
    safe = setup.on(optimizer="fused", directory=f"{setup.directory}-safe")
    stock = safe.on(mbridge_config={}, directory=f"{setup.directory}-stock")
    by_safe = verl_ranks.run(cases.train, safe, 4, (2,))
    by_stock = verl_ranks.run(cases.train, stock, 4, (2,))
    assert [rank["end"] for rank in by_safe] == [rank["end"] for rank in by_stock]
    assert "manifest.json" not in cases.directories(stock)["global_step_2"]
    for reader, written in ((safe, stock), (stock, safe)):
        place = f"{reader.directory}-reads"
        shutil.copytree(written.directory, place)
        for through, again in zip(by_stock, verl_ranks.run(cases.train, reader.on(directory=place), 4), strict=True):
            assert again["from"] == 2
            assert again["losses"] == {number: through["losses"][number] for number in (3, 4)}
            assert again["end"] == through["end"]

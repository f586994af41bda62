# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`megatron.training`'s own loop saves and resumes in `fsdp_dtensor_safe`; the script knows nothing of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.core import oracle
from tests.megatron_lm.running import pretrain
from tests.run_directories import as_it_was
from tests.unit.test_kinds import torch_dist
from tests.upstream import is_before

pytestmark = pytest.mark.bridge  # Transformer Engine and megatron.training come with the full installation

SAFE, STOCK = "fsdp_dtensor_safe", "fsdp_dtensor"


@pytest.fixture(scope="module")
def runs(training_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four iterations in each format, two saves."""
    places = {name: tmp_path_factory.mktemp(name) for name in (SAFE, STOCK)}
    for name, place in places.items():
        for result in training_ranks.run(pretrain, name, str(place), 4, ranks=2):
            assert result["code"] == 0, result["out"]
    return places


def resume(pool: RankPool, *arguments: Any, ranks: int = 2, **named: Any) -> list[dict[str, Any]]:
    return pool.run(pretrain, *arguments, ranks=ranks, **named)


def test_only_our_format_is_saved_here(runs: dict[str, Path]) -> None:
    for name, place in runs.items():
        assert (place / "latest_checkpointed_iteration.txt").read_text() == "4"
        ours = [(place / step / "manifest.json").is_file() for step in ("iter_0000002", "iter_0000004")]
        assert ours == [name == SAFE] * 2


IDLE = "--verify-integrity", "--dist-ckpt-strictness", "log_all", "--no-strict-fsdp-dtensor-load"
"""Options that change nothing; the first is obeyed, by what a load always does."""


@pytest.mark.parametrize(
    ("saved_in", "goes_on_in", "takeover"),
    [(SAFE, SAFE, False), (STOCK, STOCK, True), (SAFE, STOCK, False)],
)
def test_a_resumed_run_saves_what_the_uninterrupted_one_saved(
    saved_in: str, goes_on_in: str, takeover: bool, runs: dict[str, Path], training_ranks: RankPool, tmp_path: Path
) -> None:
    """By its name, by `run --takeover` of a run that says stock's, and by stock."""
    place = as_it_was(runs[saved_in], tmp_path)
    is_twin = saved_in == goes_on_in == SAFE
    results = resume(training_ranks, goes_on_in, place, 4, *(IDLE if is_twin else ()), takeover=takeover)
    for result in results:
        assert result["code"] == 0, result["out"]
    first, second = ([line.split(" with ")[0] for line in result["warned"] if SAFE in line] for result in results)
    assert second == []
    written = ("--no-strict-fsdp-dtensor-load", "--dist-ckpt-strictness log_all") if is_twin else ()
    assert first == [f"WARNING: {option} has no effect" for option in written]
    assert re.search(r"iteration +3/ +4 \| consumed samples: +24 ", results[-1]["out"])
    again = tmp_path / "iter_0000004"
    assert (again / "manifest.json").is_file() == (takeover or goes_on_in == SAFE)
    whole = oracle.on_disk(runs[saved_in] / "iter_0000004")
    assert len([key for key in whole if key.endswith(".exp_avg")]) == 17  # 15 parameters, 2 of them split in two
    assert oracle.on_disk(again) == whole


def test_a_run_resumes_in_another_layout(runs: dict[str, Path], training_ranks: RankPool, tmp_path: Path) -> None:
    place = as_it_was(runs[SAFE], tmp_path)
    parallel = "--tensor-model-parallel-size", "2"
    nothing_learnt = "--no-load-optim", "--lr", "0", "--weight-decay", "0"
    for result in resume(training_ranks, SAFE, place, 3, *parallel, *nothing_learnt, ranks=4, save_every=3):
        assert result["code"] == 0, result["out"]
    weights = [
        {key: value for key, value in oracle.on_disk(directory).items() if key.startswith("model.")}
        for directory in (runs[SAFE] / "iter_0000002", tmp_path / "iter_0000003")
    ]
    assert weights[0] == weights[1]


REFUSED = [
    "--non-persistent-save-interval 5",
    "--non-persistent-ckpt-type global",
    "--ckpt-convert-format torch_dist",
    *([] if is_before("megatron-core", "0.19") else ["--override-ckpt-iteration 1", "--logits-save-dir logits"]),
]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (tuple(" ".join(REFUSED).split()), f"found {', '.join(REFUSED)}. Non-persistent checkpoints are"),
        (("--use-checkpoint-args",), "found --use-checkpoint-args. "),
        (("--hidden-size", "64"), "shape"),
        (("--lr-decay-iters", "50"), "expected the schedule that was saved"),
        (("--ckpt-step", "7"), "found iter_0000002"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    more: tuple[str, ...], says: str, runs: dict[str, Path], training_ranks: RankPool, tmp_path: Path
) -> None:
    place = as_it_was(runs[SAFE], tmp_path)
    for result in resume(training_ranks, SAFE, place, 4, *more):
        assert result["code"] == 1
        assert says in result["out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]


CONFIGURED = "--lr", "1e-5", "--weight-decay", "0.05", "--adam-beta2", "0.9"
OVERRIDDEN, AS_SAVED = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
OF_ITS_OWN = "--decoupled-lr", "5e-5"  # a group that the checkpoint does not have: embeddings and output layer


@pytest.mark.parametrize(
    ("more", "applied"),
    [
        # a cosine from 1e-3 to 0 over 100 iterations was saved, after 2; from 1e-5 it is a hundredth
        ((*CONFIGURED, OVERRIDDEN), [(9.990133642e-6, 0.0, 0.999), (9.990133642e-6, 0.05, 0.999)]),
        ((*CONFIGURED, AS_SAVED), [(9.990133642e-4, 0.0, 0.999), (9.990133642e-4, 0.01, 0.999)]),
        ((*CONFIGURED, "--no-load-optim"), [(1e-5, 0.0, 0.9), (1e-5, 0.05, 0.9)]),
        (
            (*CONFIGURED, *OF_ITS_OWN, OVERRIDDEN),
            [(9.990133642e-6, 0.0, 0.999), (9.990133642e-6, 0.05, 0.999), (4.995066821e-5, 0.05, 0.999)],
        ),
        (OF_ITS_OWN, [(9.990133642e-4, 0.0, 0.999), (9.990133642e-4, 0.01, 0.999)]),
    ],
    ids=["override", "use the checkpoint's", "no optimizer state", "override, new group", "new group"],
)
def test_the_first_step_after_a_resume_obeys_the_owner(
    more: tuple[str, ...], applied: Any, runs: dict[str, Path], training_ranks: RankPool, tmp_path: Path
) -> None:
    place = as_it_was(runs[SAFE], tmp_path)
    (result,) = resume(training_ranks, SAFE, place, 4, *more, ranks=1, save_every=100)
    assert result["code"] == 0, result["out"]
    assert [(float(f"{rate:.9e}"), *others) for rate, *others in result["applied"][0]] == applied
    warned = "max_lr 0.001 (configured: 5e-05)" in result["out"]
    assert warned == (more == OF_ITS_OWN)


def test_arguments_from_yaml_are_checked_as_those_of_the_command_line(training_ranks: RankPool, tmp_path: Path) -> None:
    """Up to where stock wants those of a model, of which none are given here."""
    of_parsing = dict.fromkeys(("use_checkpoint_args", "disable_msc_deprecated", "enable_msc", "data_path"), False)
    cases = {
        "found --non-persistent-ckpt-type global. Non-persistent": {"non_persistent_ckpt_type": "global"},
        "WARNING: --dist-ckpt-strictness log_all has no effect": {"dist_ckpt_strictness": "log_all"},
    }
    for says, arguments in cases.items():
        path = tmp_path / "arguments.yaml"
        path.write_text(json.dumps(of_parsing | {"ckpt_format": SAFE} | arguments))  # JSON is YAML, too
        (result,) = resume(training_ranks, SAFE, str(tmp_path), 2, "--yaml-cfg", str(path), ranks=1)
        assert result["code"] == 1
        assert says in result["out"]


def test_a_misspelt_format_is_refused_by_the_scripts_own_parser(training_ranks: RankPool, tmp_path: Path) -> None:
    (result,) = resume(training_ranks, "fsdp_dtensor_save", str(tmp_path), 2, ranks=1)
    assert result["code"] == 2
    assert "fsdp_dtensor_safe" in result["out"]


def test_torch_dist_is_named_in_megatrons_words(training_ranks: RankPool, tmp_path: Path) -> None:
    torch_dist(tmp_path / "iter_0000001")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (result,) = resume(training_ranks, SAFE, str(tmp_path), 2, ranks=1)
    assert result["code"] == 1
    assert "found a checkpoint in Megatron's format torch_dist" in result["out"]
    assert "convert from-torch-dist" in result["out"]
    assert "--ckpt-format torch_dist" in result["out"]


def test_a_tracker_that_cannot_be_written_is_the_same_error_on_all_ranks(
    training_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    for result in resume(training_ranks, SAFE, str(tmp_path), 2, save_every=1, load=False):
        assert result["code"] == 1
        assert "StorageError: [rank 0 on " in result["out"]
        assert "The checkpoint is complete and in its place" in result["out"]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run resumes from: Bridge's places, the trackers, and what must be there."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.settings import Settings
from testing.ranks import RankPool, no_process_group
from tests.bridge.training import Run, configuration, train
from tests.patched import patched
from tests.trackers import CASES, STATE, TRACKER
from tests.unit import handmade

pytestmark = pytest.mark.bridge
ITERATIONS = ("iter_0000010", "iter_0000020", "release")
DIFFERENCES = "mbridge_fsdp_ckpt.integrations.bridge.differences"
RECOVERY = {
    "checkpoint.non_persistent_ckpt_type": "global",
    "checkpoint.non_persistent_save_interval": 1,
}


@no_process_group
def meant(roots: list[str]) -> dict[str, list[str]]:
    """What Bridge's run, its AutoBridge and Megatron-LM's run take each root to mean."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import model_load_save
    from megatron.bridge.training.config import CheckpointConfig

    from mbridge_fsdp_ckpt.integrations.bridge.locate import locate
    from mbridge_fsdp_ckpt.integrations.megatron_lm.checkpointing import _locate

    def by_bridge(root: str) -> Any:
        found = locate(root, CheckpointConfig(load=root), None)
        return found and found.directory

    def by_auto_bridge(root: str) -> Any:
        return AutoBridge.load_megatron_model(SimpleNamespace(trust_remote_code=False), root)[0]

    def by_megatron_lm(root: str) -> Any:
        return _locate(Namespace(load=root, pretrained_checkpoint=None, ckpt_step=None), root)

    mbridge_fsdp_ckpt.register()
    with patch.object(model_load_save, "load_megatron_model", lambda path, **_: path):
        found = {reader.__name__: [_said(reader, root) for root in roots] for reader in (by_bridge, by_auto_bridge)}
        lines = []
        for root in roots:
            with redirect_stdout(StringIO()) as out:
                found.setdefault("by_megatron_lm", []).append(_said(by_megatron_lm, root))
            lines.append(out.getvalue())
    return found | {"lines of Megatron-LM": lines}


def _said(reader: Any, root: str) -> str:
    try:
        found = reader(root)
    except CheckpointError as error:
        return f"!{error.found}"
    return "" if found is None else Path(found).name


def test_every_run_takes_the_trackers_to_mean_the_same(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """The tools do as well: tests/unit/test_trackers.py."""
    for name in ITERATIONS:
        handmade.make(tmp_path / name)
    roots = []
    for place, (make, _) in enumerate(CASES.values()):
        root = tmp_path / str(place)
        for name in ITERATIONS:
            shutil.copytree(tmp_path / name, root / name)
        make(root)
        roots.append(str(root))
    [said] = bridge_ranks.run(meant, roots, ranks=1)
    told = {case: line for case, line in zip(CASES, said.pop("lines of Megatron-LM"), strict=True) if line}
    assert list(told) == ["both, Bridge's newer"], "where Megatron-LM itself would take another one"
    assert "loading iter_0000020, which latest_train_state.pt" in told["both, Bridge's newer"]
    assert "give --ckpt-step 10, or delete latest_train_state.pt" in told["both, Bridge's newer"]
    said["by_auto_bridge"][0] = ""  # without a tracker it takes the newest
    wrong = [
        (case, reader, found[place])
        for place, (case, (_, means)) in enumerate(CASES.items())
        for reader, found in said.items()
        if not (found[place].startswith(means) if means.startswith("!") else found[place] == means)
    ]
    assert not wrong


@no_process_group
def located(place: str, manifest_alone: str) -> dict[str, Any]:
    """Where Bridge looks, with checkpoints below a place; directories that no tracker names."""
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    from mbridge_fsdp_ckpt.integrations.bridge.locate import locate
    from mbridge_fsdp_ckpt.integrations.megatron_lm.checkpointing import _locate

    def found(load: str | None, pretrained: str | None = None, **changes: Any) -> Any:
        config = CheckpointConfig(load=load, save=f"{place}/out", non_persistent_ckpt_type="global", **changes)
        there = locate(pretrained or load, config, config.ckpt_step)
        return there and (str(there.directory.relative_to(place)), str(there.persistent_root.relative_to(place)))

    mbridge_fsdp_ckpt.register()
    arguments = Namespace(pretrained_checkpoint=None, ckpt_step=None)
    return {
        "save's recovery": found(f"{place}/in"),
        "nowhere yet": found(f"{place}/not yet"),
        "no load": found(None),
        "chosen": found(f"{place}/in", ckpt_step=1),
        "load's recovery": found(f"{place}/newer"),
        "elsewhere": found(f"{place}/in", non_persistent_global_ckpt_dir=f"{place}/newer"),
        "base of adapters": found(f"{place}/not yet", pretrained=f"{place}/in"),
        "manifest alone": (found(manifest_alone), checkpoint_exists(manifest_alone)),
        "manifest alone, Megatron-LM": str(_locate(arguments, manifest_alone)),
    }


def test_recovery_checkpoints_are_looked_for_where_bridge_does(bridge_ranks: RankPool, tmp_path: Path) -> None:
    for root, number in (("in", 1), ("out/non_persistent", 2), ("newer/non_persistent", 3), ("newer", 4)):
        (tmp_path / root).mkdir(parents=True, exist_ok=True)
        handmade.make(tmp_path / root / f"iter_{number:07d}")
        (tmp_path / root / TRACKER).write_text(str(number))
    (tmp_path / "newer/non_persistent" / TRACKER).write_text("3")
    alone = handmade.make(tmp_path / "base")
    [found] = bridge_ranks.run(located, str(tmp_path), str(alone), ranks=1)
    assert found == {
        "save's recovery": ("out/non_persistent/iter_0000002", "out"),
        "nowhere yet": ("out/non_persistent/iter_0000002", "out"),
        "no load": ("out/non_persistent/iter_0000002", "out"),
        "chosen": ("in/iter_0000001", "in"),
        "load's recovery": ("newer/iter_0000004", "newer"),
        "elsewhere": ("newer/iter_0000004", "out"),
        "base of adapters": ("in/iter_0000001", "in"),
        "manifest alone": (("base", "."), True),
        "manifest alone, Megatron-LM": str(alone),
    }


def test_a_run_resumes_from_the_recovery_checkpoint_beside_its_saves(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """Killed before its first persistent save; `load` names what does not exist yet."""
    run = Run(str(tmp_path / "out"), 2, save_every=9, config=RECOVERY | {"checkpoint.load": str(tmp_path / "in")})
    begun = bridge_ranks.run(train, run, ranks=2)
    shutil.rmtree(tmp_path / "out" / "iter_0000002")
    (tmp_path / "out" / TRACKER).unlink()
    (tmp_path / "out" / STATE).unlink()
    again = bridge_ranks.run(train, run.on(iterations=3), ranks=2)
    assert [(list(one["losses"]), one["loaded"]) for one in again] == [([3], one["end"]) for one in begun]


@no_process_group
def train_without_progress(run: Run) -> dict[str, Any]:
    """Save as a converter does: no training loop says how far it was."""
    from mbridge_fsdp_ckpt.integrations.bridge import manager

    with patch.object(manager, "_values", lambda *_: {}):
        return train(run)


def test_a_release_gives_weights_alone_and_training_begins_at_0(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """Named by a tracker, or by its directory: which holds neither optimizer, nor generators, nor progress."""
    alone = {"checkpoint.save_optim": False, "checkpoint.save_rng": False}
    run = Run(str(tmp_path), 2, config=alone)
    [written] = bridge_ranks.run(train_without_progress, run, ranks=1)
    (tmp_path / "iter_0000002").rename(tmp_path / "release")
    (tmp_path / STATE).unlink()
    (tmp_path / TRACKER).write_text("release\n")
    weights = {key: value for key, value in written["end"].items() if key.startswith("model.")}
    assert len(weights) > 20
    for load in (tmp_path, tmp_path / "release"):
        config = {"checkpoint.load": str(load), "checkpoint.save": str(tmp_path / "out")}
        [found] = bridge_ranks.run(train, run.on(iterations=1, save_every=9, config=config), ranks=1)
        assert {key: found["loaded"][key] for key in weights} == weights
        assert (found["progress"]["step"], found["progress"]["consumed_train_samples"]) == (0, 0)
        assert list(found["losses"]) == [1]


@no_process_group
def refusal(run: Run, *, own_loop: bool = False, **more: bool) -> str:
    """What a run that must not begin says."""
    try:
        if own_loop:
            return str(_load(run, **more))
        train(run)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "it trains"


def _load(run: Run, **more: bool) -> Any:
    from megatron.bridge.training.checkpointing import load_checkpoint

    mbridge_fsdp_ckpt.register()
    return load_checkpoint(SimpleNamespace(cfg=configuration(run)), [], None, None, **more)


def test_a_run_that_is_told_to_resume_never_begins_anew(bridge_ranks: RankPool, tmp_path: Path) -> None:
    root, empty = tmp_path / "root", tmp_path / "empty"
    root.mkdir()
    empty.mkdir()
    handmade.make(root / "iter_0000002")
    base = tmp_path / "base"
    base.mkdir()
    handmade.make(base / "iter_0000007")
    (base / TRACKER).write_text("7")
    over_base = {"checkpoint.load": str(empty), "checkpoint.pretrained_checkpoint": str(base)}
    run = Run(str(tmp_path / "out"))
    must = {"checkpoint.exit_on_missing_checkpoint": True}
    refused: dict[tuple[str, bool], tuple[dict[str, Any], str]] = {
        ("mistyped", False): ({"checkpoint.load": str(tmp_path / "mistyped"), **must}, "no such directory"),
        ("empty", False): ({"checkpoint.load": str(empty), **must}, "an empty directory"),
        ("empty", True): ({"checkpoint.load": str(empty), **must}, "an empty directory"),
        ("empty, chosen", False): ({"checkpoint.load": str(empty), "checkpoint.ckpt_step": 7}, "an empty directory"),
        ("not there", False): ({"checkpoint.load": str(root), "checkpoint.ckpt_step": 7}, "found iter_0000002"),
        ("no tracker", False): (
            {"checkpoint.load": str(root), "checkpoint.ckpt_step": 2},
            f"Set checkpoint.load={root}/iter_0000002",
        ),
        ("pretrained", False): (
            {
                "checkpoint.load": str(empty),
                "checkpoint.pretrained_checkpoint": str(root / "iter_0000002"),
                "checkpoint.ckpt_step": 7,
            },
            "an empty directory",
        ),
        ("pretrained", True): (
            {
                "checkpoint.load": str(empty),
                "checkpoint.pretrained_checkpoint": str(root / "iter_0000002"),
                "checkpoint.ckpt_step": 7,
            },
            "iteration 7, which checkpoint.ckpt_step names",
        ),
    }
    refused["gone", False] = ({"checkpoint.load": str(root / "iter_0000009")}, "found iter_0000002. Check the path")
    refused["adapters, empty", False] = (over_base | must, "a checkpoint of adapters in checkpoint.load, since")
    refused["adapters, chosen", False] = (over_base | {"checkpoint.ckpt_step": 7}, "an empty directory")
    for (name, own_loop), (config, says) in refused.items():
        told = run.on(config=config, adapters=name.startswith("adapters"))
        for text in bridge_ranks.run(refusal, told, own_loop=own_loop, ranks=2):
            assert text.startswith("NotACheckpointError: "), (name, own_loop, text)
            assert says in text, (name, own_loop, text)
    first = run.on(config=over_base | must | {"checkpoint.load": str(tmp_path / "out")}, adapters=True)
    for text in bridge_ranks.run(refusal, first, ranks=2):
        assert text.startswith("KeyMismatchError: "), f"fresh adapters begin where the run itself saves: {text}"
    free = run.on(config={"checkpoint.load": str(empty)})
    assert bridge_ranks.run(refusal, free, own_loop=True, ranks=2) == ["(0, 0)"] * 2
    assert not list(tmp_path.glob("out/iter_*")), "nothing was trained"


@no_process_group
def refusal_of_view(run: Run, loads: list[str]) -> list[str]:
    """What a run says where the last rank's file system shows another state."""
    mbridge_fsdp_ckpt.register(Settings(time_limit=60))
    return [refusal(_seen_here(run, loads))]


def refusals_of_loops(run: Run, loads: list[str]) -> list[str]:
    """The same of loops of one's own, of both hosts."""
    mbridge_fsdp_ckpt.register(Settings(time_limit=60))
    here = _seen_here(run, loads)
    return [refusal(here, own_loop=True), _refusal_of_megatron_lm(here.config["checkpoint.load"])]


def refusals_of_one_file(run: Run, load: str) -> list[str]:
    """Where the last rank cannot read a file that the load goes by: the run configuration, one of Hugging Face's."""
    mbridge_fsdp_ckpt.register(Settings(time_limit=60))

    def failing(function: Any) -> Any:
        def read(*args: Any) -> Any:
            if os.environ["RANK"] == "1":
                raise OSError(5, "Input/output error")
            return function(*args)

        return read

    here = _seen_here(run, [load, load])
    with (
        patched(f"{DIFFERENCES}:starts_with_fresh_optimizer", lambda _: lambda: True),
        patched("mbridge_fsdp_ckpt.integrations.bridge.run_config:read_bounded", failing),
    ):
        found = [refusal(here, own_loop=True)]
    with patched(f"{DIFFERENCES}:is_hugging_face", failing):
        return [*found, refusal(here, own_loop=True)]


@no_process_group
def refusals_to_skip(run: Run) -> list[str]:
    """What loops say that ask for a load which fills nothing."""
    skips = {"skip_load_to_model_and_opt": True}
    return [refusal(run, own_loop=True, **skips), _refusal_of_megatron_lm(run.config["checkpoint.load"], **skips)]


def _seen_here(run: Run, loads: list[str]) -> Run:
    return run.on(config=run.config | {"checkpoint.load": loads[int(os.environ["RANK"])]})


def _refusal_of_megatron_lm(load: str, **more: Any) -> str:
    from mbridge_fsdp_ckpt.integrations.megatron_lm import checkpointing

    args = Namespace(load=load, pretrained_checkpoint=None, ckpt_step=None, exit_on_missing_checkpoint=False)
    with patch.object(checkpointing, "get_args", lambda: args):
        try:
            return str(checkpointing.load_checkpoint([], None, None, **more))
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"


def test_where_ranks_see_different_things_none_begins(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """As where one host's NFS client still shows the directory of before the last save."""
    root, stale = tmp_path / "root", tmp_path / "stale"
    stale.mkdir()
    root.mkdir()
    handmade.make(root / "iter_0000002")
    (root / TRACKER).write_text("2")
    loads = [str(root), str(stale)]
    by_run, by_loops = (
        bridge_ranks.run(case, Run(str(tmp_path / "out")), loads, ranks=2)
        for case in (refusal_of_view, refusals_of_loops)
    )
    assert (by_run[0], by_loops[0]) == (by_run[1], by_loops[1])
    for text in (*by_run[0], *by_loops[0]):
        assert text.startswith("NotACheckpointError: expected all ranks to find the same checkpoint to load"), text
        assert f"on rank 0 {root}/iter_0000002" in text
        assert f"on rank 1 no checkpoint in {stale}" in text
    run = Run(str(tmp_path / "out"), config={"checkpoint.load": str(root)})
    (root / "iter_0000002" / "run_config.yaml").write_text("checkpoint: {save_optim: true}\n")
    by_file = bridge_ranks.run(refusals_of_one_file, run, str(root), ranks=2)
    assert by_file[0] == by_file[1], "an error of one rank is that of all"
    assert all("Input/output error" in text and "rank 1" in text for text in by_file[0]), by_file[0]
    for text in bridge_ranks.run(refusals_to_skip, run, ranks=1)[0]:
        assert text.startswith("ConfigurationError: "), text
        assert "skip_load_to_model_and_opt=True" in text, text

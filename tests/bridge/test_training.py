# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's own `pretrain()` saves, resumes and reshards in `fsdp_dtensor_safe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.outcomes import RankFailed
from testing.ranks import RankPool
from tests.bridge.training import Run, train
from tests.core import oracle
from tests.run_directories import as_it_was
from tests.soak import sampling

pytestmark = pytest.mark.bridge

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FusedAdam": {},
    "torch Adam": {"optimizer": "torch"},
    "offload 1.0": {"offload": 1.0},
    "offload 0.5": {"offload": 0.5},
    "issue 4910": {
        "offload": 1.0,
        "config": {
            "optimizer.use_precision_aware_optimizer": True,
            "ddp.megatron_fsdp_use_decoupled_grad": True,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": True,
        },
    },
}
SIZES = [(8, 2), (8, 4), (64, 2), (64, 4)]
LAYOUTS = [
    (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (4, 2, 2),
]  # fmt: skip


# Each time also FusedAdam over Transformer Engine's own modules: tests/examples.
@pytest.mark.parametrize("name", sampling.drawn("optimizers of Bridge", list(OPTIMIZERS), share=4))
def test_a_resumed_run_repeats_the_uninterrupted_one(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path / "whole"), **OPTIMIZERS[name])
    whole = bridge_ranks.run(train, run, ranks=2)
    resumed = bridge_ranks.run(train, run.on(directory=as_it_was(tmp_path / "whole", tmp_path / "b")), ranks=2)
    for through, again in zip(whole, resumed, strict=True):
        assert list(through["losses"]) == [1, 2, 3, 4]
        assert again["losses"] == {step: through["losses"][step] for step in (3, 4)}
        assert again["end"] == through["end"]
        assert through["saves"] == [{}, {}], "a save issues no collective"
    assert len([key for key in whole[0]["end"] if key.endswith(".exp_avg")]) == len(
        [key for key in whole[0]["end"] if key.startswith("model.")]
    )


def test_a_checkpoint_resumes_in_every_other_layout(bridge_ranks: RankPool, tmp_path: Path) -> None:
    first = Run(str(tmp_path / "first"), iterations=2)
    saved = bridge_ranks.run(train, first, ranks=2)[0]
    disk = oracle.on_disk(tmp_path / "first" / "iter_0000002")
    assert disk == saved["end"]
    for ranks, tensor, expert in sampling.drawn("layouts of Bridge", LAYOUTS, share=3):
        place = tmp_path / f"{ranks}-{tensor}-{expert}"
        run = first.on(directory=as_it_was(tmp_path / "first", place), tensor=tensor, expert=expert)
        again = run.on(iterations=2, save_every=1, config={"train.train_iters": 3, "checkpoint.save_interval": 3})
        resumed = bridge_ranks.run(train, again, ranks=ranks)[0]
        assert resumed["loaded"] == saved["end"], (ranks, tensor, expert)
        assert list(resumed["losses"]) == [3]


def test_stock_reads_what_safe_wrote_and_safe_what_stock_wrote(bridge_ranks: RankPool, tmp_path: Path) -> None:
    runs = {}
    for name in ("fsdp_dtensor", "fsdp_dtensor_safe"):
        run = Run(str(tmp_path / name), format=name, config={"checkpoint.strict_fsdp_dtensor_load": True})
        runs[name] = run, bridge_ranks.run(train, run, ranks=2)[0]
    (stock, by_stock), (safe, by_safe) = runs.values()
    assert by_safe["losses"] == by_stock["losses"]
    assert by_safe["end"] == by_stock["end"]
    stock_disk = oracle.on_disk(tmp_path / "fsdp_dtensor" / "iter_0000002")
    assert oracle.on_disk(tmp_path / "fsdp_dtensor_safe" / "iter_0000002") == stock_disk
    for reader, written in ((stock, "fsdp_dtensor_safe"), (safe, "fsdp_dtensor")):
        place = as_it_was(tmp_path / written, tmp_path / f"{reader.format}-reads")
        read = bridge_ranks.run(train, reader.on(directory=place), ranks=2)[0]
        assert read["loaded"] == stock_disk
        assert read["losses"] == {step: by_stock["losses"][step] for step in (3, 4)}


def test_adapters_begin_over_a_base_in_this_format_and_resume(bridge_ranks: RankPool, tmp_path: Path) -> None:
    """Bridge loads the base before the model is wrapped: other formats fill it then, this one has to as well."""
    base, out = Run(str(tmp_path / "base"), iterations=1, save_every=1), str(tmp_path / "out")
    bridge_ranks.run(train, base, ranks=2)
    weights = {"checkpoint.load": base.directory, "checkpoint.finetune": True, "checkpoint.save": out + "/tuned"}
    [tuned, _] = bridge_ranks.run(train, base.on(save_every=9, config=weights), ranks=2)
    over = {"checkpoint.pretrained_checkpoint": base.directory, "checkpoint.exit_on_missing_checkpoint": True}
    run = Run(out, iterations=2, adapters=True, config=over)
    [first, _] = bridge_ranks.run(train, run, ranks=2)
    assert first["losses"][1] == tuned["losses"][1], "adapters change nothing before their first step"
    [again, _] = bridge_ranks.run(train, run.on(iterations=3, save_every=3), ranks=2)
    assert list(again["losses"]) == [3]
    assert again["loaded"] == first["end"]
    assert any("adapter" in key for key in first["end"])
    without_memory = run.on(config=over | {"model.init_model_with_meta_device": True, "checkpoint.load": None})
    with pytest.raises(RankFailed, match="init_model_with_meta_device=False"):
        bridge_ranks.run(train, without_memory, ranks=1)


@pytest.mark.parametrize(("experts", "ranks"), sampling.drawn("sizes without collectives", SIZES, share=4))
def test_a_save_issues_no_collective_at_any_size(
    ranks: int, experts: int, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), iterations=1, save_every=1, experts=experts)
    assert [result["saves"] for result in bridge_ranks.run(train, run, ranks=ranks)] == [[{}]] * ranks

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Each number of the optimizer has one owner, and the first step after a resume obeys it: under Bridge's `pretrain()`.

Expected numbers are literals: the schedule is linear, from 1e-3 to 1e-4 in the saving run, from 1e-5 to 1e-6 in the
others, over 10 iterations, of which 2 were trained.  Embeddings and output layer have a learning rate of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.applied import Applied
from tests.bridge.training import Run, train
from tests.run_directories import as_it_was

pytestmark = pytest.mark.bridge


def configured(rate: float, decay: float, beta: float) -> dict[str, Any]:
    """Settings of a run: its highest learning rate, weight decay and second beta."""
    return {
        "optimizer.lr": rate,
        "optimizer.min_lr": rate / 10,
        "optimizer.decoupled_lr": rate * 2,
        "optimizer.decoupled_min_lr": rate / 5,
        "optimizer.weight_decay": decay,
        "optimizer.adam_beta2": beta,
        "scheduler.start_weight_decay": decay,
        "scheduler.end_weight_decay": decay,
        "scheduler.lr_decay_style": "linear",
        "scheduler.lr_decay_iters": 10,
    }


SAVED, OTHER = configured(1e-3, 0.1, 0.95), configured(1e-5, 0.05, 0.9)
CHECKPOINTS_SCHEDULE = {
    "scheduler.override_opt_param_scheduler": False,
    "scheduler.use_checkpoint_opt_param_scheduler": True,
}


def numbers(rate: float, decay: float, beta: float) -> Applied:
    """Of a step: norms do not decay, embeddings and output layer learn twice as fast."""
    return sorted([(rate, 0.0, beta), (rate, decay, beta), (round(rate * 2, 12), decay, beta)])


CASES: dict[str, tuple[dict[str, Any], list[Applied]]] = {
    "the configuration's (the default)": ({}, [numbers(8.2e-6, 0.05, 0.95), numbers(7.3e-6, 0.05, 0.95)]),
    "the configuration's, offloaded": (
        {"offload": 0.5},
        [numbers(8.2e-6, 0.05, 0.95), numbers(7.3e-6, 0.05, 0.95)],
    ),
    "the checkpoint's": (CHECKPOINTS_SCHEDULE, [numbers(8.2e-4, 0.1, 0.95), numbers(7.3e-4, 0.1, 0.95)]),
    "no optimizer state": (
        {"checkpoint.load_optim": False},
        [numbers(1e-5, 0.05, 0.9), numbers(9.1e-6, 0.05, 0.9)],
    ),
}


def train_each(runs: list[Run]) -> list[list[Applied]]:
    """What the steps of one run after the other were handed."""
    each: Callable[[Run], dict[str, Any]] = train
    return [each(run)["applied"] for run in runs]


def test_the_first_step_after_a_resume_obeys_the_owner(bridge_ranks: RankPool, tmp_path: Path) -> None:
    first = Run(str(tmp_path / "saved"), iterations=2, config=SAVED)
    runs = [
        first.on(
            directory=str(tmp_path / str(number)),
            iterations=4,
            save_every=100,
            offload=more.get("offload", 0.0),
            config=OTHER | {name: value for name, value in more.items() if "." in name},
        )
        for number, (more, _) in enumerate(CASES.values())
    ]
    [[applied]] = bridge_ranks.run(train_each, [first], ranks=1)
    assert applied == [numbers(1e-3, 0.1, 0.95), numbers(9.1e-4, 0.1, 0.95)]
    for run in runs:
        as_it_was(tmp_path / "saved", Path(run.directory))
    [found] = bridge_ranks.run(train_each, runs, ranks=1)
    assert dict(zip(CASES, found, strict=True)) == {name: expected for name, (_, expected) in CASES.items()}

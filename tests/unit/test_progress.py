# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How far a run was is read from what its loop saved, and never guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.integrations.common.progress import SAMPLES, Progress

OF_BRIDGE = {
    "step": torch.tensor(3),
    "consumed_train_samples": torch.tensor(12),
    "skipped_train_samples": torch.tensor(4),
    "consumed_valid_samples": torch.tensor(2),
    "floating_point_operations_so_far": torch.tensor(1e20, dtype=torch.float64),
    "do_train": torch.tensor(True),
}
ARGUMENTS = {"consumed_train_samples": 16, "skipped_train_samples": 4, "consumed_valid_samples": 2}
OF_MEGATRON_LM: dict[str, Any] = {"iteration": 3, "num_floating_point_operations_so_far": 7.0, "args": ARGUMENTS}


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("values", "iteration", "samples", "operations"),
    [
        ({"iteration": 3, "train_state": OF_BRIDGE}, 3, (12, 4, 2), 1e20),
        (OF_MEGATRON_LM, 3, (16, 4, 2), 7.0),
        (OF_MEGATRON_LM | {"args": without(ARGUMENTS, "skipped_train_samples")}, 3, (16, 0, 2), 7.0),
        (
            {"train_state": OF_BRIDGE, **OF_MEGATRON_LM, "args": ARGUMENTS | {"consumed_train_samples": 12}},
            3,
            (12, 4, 2),
            1e20,
        ),
    ],
    ids=["Bridge", "Megatron-LM", "Megatron-LM before it skipped samples", "both"],
)
def test_what_each_loop_says(
    values: dict[str, Any], iteration: int, samples: tuple[int, ...], operations: float
) -> None:
    assert Progress.of(values, remedy="") == Progress(iteration, dict(zip(SAMPLES, samples, strict=True)), operations)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, "consumed_train_samples"),
        ({"iteration": 2, "save_contents": ["model"]}, "consumed_train_samples"),
        (without(OF_MEGATRON_LM, "args"), "consumed_train_samples"),
        (without(OF_MEGATRON_LM, "iteration"), "none of iteration"),
        (without(OF_MEGATRON_LM, "num_floating_point_operations_so_far"), "none of operations"),
        ({"train_state": without(OF_BRIDGE, "consumed_valid_samples")}, "none of consumed_valid_samples"),
        (OF_MEGATRON_LM | {"iteration": "three"}, "three"),
        ({"train_state": OF_BRIDGE, **OF_MEGATRON_LM}, "12 from Bridge, 16 from Megatron-LM"),
        ({"train_state": OF_BRIDGE | {"step": torch.ones(2)}}, "numbers of iterations"),
    ],
)
def test_what_is_not_said_is_refused_with_what_to_set(values: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match="Begin at 0") as caught:
        Progress.of(values, remedy="Begin at 0.")
    assert found in str(caught.value)

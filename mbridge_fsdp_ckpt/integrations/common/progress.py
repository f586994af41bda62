# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How far a run was when it was saved, as Bridge and Megatron-LM say it: read, never computed.

    Bridge         train_state: step, samples, operations; of stock in a file beside the tensors
    Megatron-LM    iteration, num_floating_point_operations_so_far, args: samples; of stock a pickle
    VeRL           iteration alone, which is its step: its driver keeps the position in the data elsewhere

Both loops count samples alike, so that each continues from what the other saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mbridge_fsdp_ckpt.errors import KeyMismatchError, ManifestError
from mbridge_fsdp_ckpt.format.names import ARGUMENTS, PROGRESS

SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_OPERATIONS, _OF_BRIDGE = "num_floating_point_operations_so_far", "floating_point_operations_so_far"


@dataclass(frozen=True, slots=True)
class Progress:
    """Numbers of a saved run.

    Args:
        iteration: Iterations done.
        samples: The counts of samples, by the names in `SAMPLES`.
        operations: Floating-point operations.
    """

    iteration: int
    samples: Mapping[str, int]
    operations: float

    @classmethod
    def of(cls, values: Mapping[str, Any], *, remedy: str) -> Self:
        """What a checkpoint's values say.

        Args:
            values: The values of the checkpoint.
            remedy: How a user begins anew.

        Raises:
            KeyMismatchError: They do not say how far the data were read, or another of the numbers; or say two things.
            ManifestError: What they say is no number.
        """
        arguments = dict(values.get(ARGUMENTS, {}))
        if PROGRESS in values:
            _check_one_loop(values[PROGRESS], arguments, remedy)
            found = dict(values[PROGRESS])
            numbers = {**found, "iteration": found.get("step"), "operations": found.get(_OF_BRIDGE)}
        else:
            if "consumed_train_samples" in arguments:
                arguments.setdefault("skipped_train_samples", 0)  # of a release that knew of none, as stock reads it
            numbers = {**arguments, "iteration": values.get("iteration"), "operations": values.get(_OPERATIONS)}
        missing = [name for name in (*SAMPLES, "iteration", "operations") if numbers.get(name) is None]
        if missing:
            raise KeyMismatchError(
                expected="a checkpoint that says how far its run was",
                found=f"none of {', '.join(missing)}, as in one of VeRL, or saved without a training loop",
                remedy=remedy,
                key=missing[0],
            )
        try:
            samples = {name: int(numbers[name]) for name in SAMPLES}
            return cls(int(numbers["iteration"]), samples, float(numbers["operations"]))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ManifestError(
                expected="numbers of iterations, samples and operations", found=str(error)[:200], remedy=remedy
            ) from error


def _check_one_loop(of_bridge: Mapping[str, Any], arguments: Mapping[str, Any], remedy: str) -> None:
    """Megatron-LM leaves Bridge's file of progress where it saves into a directory of Bridge's."""
    name = SAMPLES[0]
    if name in of_bridge and name in arguments and of_bridge[name] != arguments[name]:
        raise KeyMismatchError(
            expected="one number of consumed samples",
            found=f"{int(of_bridge[name])} from Bridge, {arguments[name]} from Megatron-LM: one saved over the other",
            remedy=f"Take another checkpoint. {remedy}",
            key=name,
        )

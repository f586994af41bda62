"""What ranks do in the tests of saves beside the training."""

from __future__ import annotations

from typing import Any

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.testing.models import Recipe
from tests.core import cases
from tests.soak.kill import iteration


def save_every_step(root: str, recipe: Recipe, steps: int, settings: Settings, background: bool) -> dict[str, Any]:
    """Training with a save after every step: losses, and whether each save had its snapshot when the next ended."""
    trainable = cases.prepared(recipe, steps=1)
    losses: list[float] = []
    taken: list[bool] = []
    for number in range(1, steps + 1):
        saving = mbridge_fsdp_ckpt.save(
            iteration(root, number),
            model=trainable.model,
            optimizer=trainable.optimizer,
            values={"iteration": number, "losses": losses},
            rank_values={"losses": losses},
            settings=settings,
            background=background,  # type: ignore[call-overload]
        )
        losses.append(trainable.step(number))
        taken.append(saving.taken if background else True)
    mbridge_fsdp_ckpt.finish_saves()
    return {"losses": losses, "taken": taken}

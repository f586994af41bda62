# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""All recipes by name, each also as `NAME_tiny`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError
from recipes import nemotron, qwen
from recipes.tiny import shrink


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training run.

    Args:
        function: Makes the full-size configuration of Megatron-Bridge.
        gpus: How many it is laid out for; the tiny variant runs on the smallest number that its layout allows.
        tiny: Whether this is the tiny variant.
    """

    function: Callable[[], Any]
    gpus: int
    tiny: bool = False

    @property
    def name(self) -> str:
        """What the launcher calls it."""
        return f"{self.function.__name__}_tiny" if self.tiny else self.function.__name__

    @property
    def description(self) -> str:
        """A few words."""
        return (inspect.getdoc(self.function) or "").splitlines()[0].rstrip(".")

    @property
    def finetunes(self) -> bool:
        """Whether it starts from a pretrained checkpoint."""
        return self.function.__name__.endswith("_sft")

    def make(self) -> Any:
        """The configuration, to be changed by overrides."""
        config = self.function()
        if self.tiny:
            shrink(config)
        return config


FULL = {
    recipe.name: recipe
    for recipe in (
        Recipe(qwen.qwen35_35b_a3b_pretrain, gpus=32),
        Recipe(qwen.qwen35_35b_a3b_sft, gpus=32),
        Recipe(qwen.qwen35_397b_a17b_pretrain, gpus=256),
        Recipe(qwen.qwen3_30b_a3b_pretrain, gpus=16),
        Recipe(qwen.qwen3_next_80b_a3b_pretrain, gpus=32),
        Recipe(qwen.qwen3_8b_pretrain, gpus=8),
        Recipe(nemotron.nemotron_3_nano_pretrain, gpus=16),
    )
}
RECIPES = FULL | {f"{name}_tiny": replace(recipe, tiny=True) for name, recipe in FULL.items()}


def find(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    longer = [known for known in RECIPES if known.startswith(name)] if name else []
    near = longer or difflib.get_close_matches(name, RECIPES, 1)
    raise ConfigurationError(
        expected=f"a recipe: {', '.join(FULL)}; or one of these with _tiny",
        found=repr(name),
        remedy=f"Did you mean {near[0]!r}?" if near else "--list says what each one trains.",
    )

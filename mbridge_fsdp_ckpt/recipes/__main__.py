"""Train a recipe with Megatron-Bridge, under torchrun.

torchrun --nproc-per-node 2 -m mbridge_fsdp_ckpt.recipes qwen35_tiny train.train_iters=4 checkpoint.save=/scratch/a
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.bridge import register
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.recipes import overrides
from mbridge_fsdp_ckpt.recipes.qwen35 import RECIPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 2 where a named error of this package ended the run, which is then printed."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.list:
        for name, recipe in RECIPES.items():
            print(f"{name:20} {(inspect.getdoc(recipe) or '').splitlines()[0]}")
        return 0
    if given.recipe is None:
        parser.error("which recipe? --list lists them")
    try:
        _train(given.recipe, given.overrides, given.assignments)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def find(name: str) -> Callable[[], Any]:
    """The function that makes a recipe's configuration.

    Raises:
        ConfigurationError: There is no recipe of that name.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        raise ConfigurationError(
            expected=f"a recipe: {', '.join(RECIPES)}",
            found=repr(name),
            remedy=f"Did you mean {near[0]!r}?" if near else "--list says what each one trains.",
        )
    return RECIPES[name]


def _train(recipe: str, file: Path | None, assignments: Sequence[str]) -> None:
    make = find(recipe)
    # All that is wrong with the overrides by themselves is said before Megatron's imports, which take a minute.
    chosen = (overrides.from_file(file) if file else {}) | overrides.from_arguments(assignments)
    register()
    from megatron.bridge.training import pretrain
    from megatron.bridge.training.gpt_step import forward_step

    config = make()
    overrides.apply(config, chosen)
    pretrain.pretrain(config, forward_step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mbridge_fsdp_ckpt.recipes",
        description="Train a recipe with Megatron-Bridge, saving in fsdp_dtensor_safe.  Run it under torchrun.",
    )
    parser.add_argument("recipe", nargs="?", help="name of the recipe")
    parser.add_argument(
        "assignments",
        nargs="*",
        metavar="key=value",
        help="a setting by its dotted name in Megatron-Bridge's configuration; the value is YAML",
    )
    parser.add_argument("--list", action="store_true", help="list the recipes and end")
    parser.add_argument(
        "--overrides", type=Path, metavar="FILE.yaml", help="settings by dotted name; key=value arguments win over it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

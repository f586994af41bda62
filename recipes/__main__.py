# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Train a recipe with Megatron-Bridge, under torchrun.

torchrun --nproc-per-node 4 -m recipes qwen3_8b_pretrain_tiny train.train_iters=4
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from recipes import overrides
from recipes.catalog import FULL, Recipe, find
from recipes.settings import REQUIRED

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")

INTERRUPTED = 130
"""The exit code that shells give a command that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 2 where a named error of this package ended the run, which is then printed."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.list:
        for name, recipe in FULL.items():
            print(f"{name:27}  {recipe.gpus:3} GPUs  {recipe.description}")
        print(f"{'each also as NAME_tiny':27}  the same in small sizes: trains in seconds")
        return 0
    if given.recipe is None:
        parser.error("which recipe? --list lists them")
    try:
        _train(given.recipe, given.overrides, given.assignments)
    except CheckpointError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" or error.rank is not None:  # what all ranks say is said once a host
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted; a run with the same settings resumes from its last checkpoint", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _train(name: str, file: Path | None, assignments: Sequence[str]) -> None:
    recipe = find(name)
    # All that is wrong with the overrides by themselves is said before Megatron's imports, which take a minute.
    chosen = (overrides.from_file(file) if file else {}) | overrides.from_arguments(assignments)
    from mbridge_fsdp_ckpt.integrations.bridge import register

    register()
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    config = recipe.make()
    overrides.apply(config, chosen)
    check_complete(recipe, config)
    check_ranks(recipe, config.model)
    (finetune if recipe.finetunes else pretrain)(config, forward_step)


def check_complete(recipe: Recipe, config: Any) -> None:
    """Whether the user has given what only the user knows.

    Raises:
        ConfigurationError: A required setting has no value, or names what isn't there.
    """
    if not recipe.finetunes:
        return
    for name, meaning in REQUIRED.items():
        section, _, field = name.partition(".")
        if not getattr(getattr(config, section), field):
            raise ConfigurationError(
                expected=meaning, found="nothing", remedy=f"Give {name}=DIRECTORY, or put it into a file.", key=name
            )
    _check_exists("checkpoint.pretrained_checkpoint", str(config.checkpoint.pretrained_checkpoint))
    _check_exists("dataset.dataset_root", f"{config.dataset.dataset_root}/training.jsonl")


def _check_exists(name: str, path: str) -> None:
    from mbridge_fsdp_ckpt.io.store import as_path

    if not as_path(path).exists():
        raise ConfigurationError(
            expected=REQUIRED[name], found=f"no {path}", remedy=f"Give {name}=DIRECTORY.", key=name
        )


def check_ranks(recipe: Recipe, model: Any) -> None:
    """Whether the job's ranks can hold the layout.

    Raises:
        ConfigurationError: They can't, or there is one rank because torchrun was forgotten.
    """
    least, ranks = fewest_ranks(model), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % least == 0:
        return
    sizes = ", ".join(f"model.{name}={getattr(model, name)}" for name in _SIZES)
    nodes = f"--nnodes {math.ceil(least / 8)} ... " if least > 8 else ""
    raise ConfigurationError(
        expected=f"{least} ranks, or a multiple, for {sizes}",
        found=f"{ranks}" if "RANK" in os.environ else f"{ranks}, not started by torchrun",
        remedy=f"Run `torchrun {nodes}--nproc-per-node {min(least, 8)} -m recipes {recipe.name} ...`"
        ", or make these sizes smaller.",
    )


def fewest_ranks(model: Any) -> int:
    """The smallest number of ranks that a model's layout divides."""
    expert = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or 1)
    return math.lcm(model.tensor_model_parallel_size * model.context_parallel_size, expert)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
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

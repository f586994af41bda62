# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Writes docs/options.md from the tables of options:  python -m tests.options

With `--megatron-lm` it prints, as JSON, which options `megatron.training` has: importing that changes a process.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from mbridge_fsdp_ckpt.integrations.bridge import options as bridge
from mbridge_fsdp_ckpt.integrations.common.options import Handling, Option
from mbridge_fsdp_ckpt.integrations.megatron_lm import options as megatron_lm
from mbridge_fsdp_ckpt.integrations.verl import options as verl

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
TABLES: dict[str, tuple[Option, ...]] = {
    "Megatron-Bridge": bridge.OPTIONS,
    "Megatron-LM": (*megatron_lm.OPTIONS, *megatron_lm.ELSEWHERE),
    "VeRL": verl.OPTIONS,
}
ENUMERATED: dict[str, tuple[Option, ...]] = {
    "Megatron-Bridge": tuple(option for option in bridge.OPTIONS if option.name.startswith("checkpoint.")),
    "Megatron-LM": megatron_lm.OPTIONS,
    "VeRL": verl.OPTIONS,
}
"""The part that is compared with what a host has, name by name."""

SOURCES = Path(sys.prefix) / "sources"
"""Where `make test-portable` puts the files of frameworks that a stack does not install."""

_OF_MEGATRON = ("megatron/training/config/training_config.py", "CheckpointConfig")

HEAD = """# Options of the frameworks

Written by `python -m tests.options` from the tables that the package checks a run's configuration against. A test
compares them with the options that the frameworks have (`tests/unit/test_options.py`): on the stacks `current` and
`verl`, of which the second is checked without Megatron-Bridge and VeRL installed; their files are read.

- **obeyed**: means what it means in stock. Where the text names values that are refused, the others are obeyed.
- **in part**: works, but for what the text says; a warning says so where it is set.
- **refused**: an error before training begins, the same on every rank. It names all refused options at once.
- **no effect**: a warning, once, where it is set to something other than the framework's default.

An option that a later release adds is warned of where it is set.
"""
INTRODUCTIONS = {
    "Megatron-Bridge": "`ConfigContainer.validate` checks them, and each save and load refuses again.",
    "Megatron-LM": "`validate_args` checks them, and each save refuses again. `Settings` are given to "
    "`mbridge_fsdp_ckpt.integrations.megatron_lm.register`.",
    "VeRL": "Fields of a role's `checkpoint`, checked when its checkpoint manager is built.",
}
ORDER = (Handling.OBEYED, Handling.IN_PART, Handling.REFUSED, Handling.NO_EFFECT)


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for host, table in TABLES.items():
        lines += [f"## {host}", "", INTRODUCTIONS[host], "", "| option | | |", "| --- | --- | --- |", *_rows(table), ""]
    return "\n".join(lines)


def _rows(table: Iterable[Option]) -> list[str]:
    """Options of the same handling and text share a row."""
    rows: dict[tuple[Handling, str], list[str]] = {}
    for option in table:
        text = f"{option.text} {option.remedy}" if option.handling is Handling.REFUSED else option.text
        rows.setdefault((option.handling, text), []).append(f"`{option.written}`{_releases(option)}")
    found = sorted(rows.items(), key=lambda row: ORDER.index(row[0][0]))
    return [f"| {', '.join(names)} | {handling} | {text} |" for (handling, text), names in found]


def _releases(option: Option) -> str:
    said = [f"from {option.since}"] * bool(option.since) + [f"before {option.until}"] * bool(option.until)
    return f" ({', '.join(said)})" if said else ""


def of_bridge() -> list[str]:
    """What the installed Bridge's checkpoint configuration has."""
    from megatron.bridge.training.config import CheckpointConfig

    return [f"checkpoint.{each.name}" for each in fields(CheckpointConfig)]


def of_verl() -> list[str]:
    """What the installed VeRL's checkpoint configuration for Megatron has."""
    from verl.workers.config import McoreCheckpointConfig

    return [each.name for each in fields(McoreCheckpointConfig) if not each.name.startswith("_")]


def of_megatron_lm() -> dict[str, list[str]]:
    """The checkpointing arguments of the installed `megatron.training`, with their flags."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    groups = [group for group in parser._action_groups if group.title == megatron_lm.GROUP]
    return {action.dest: list(action.option_strings) for group in groups for action in group._group_actions}


PLACES = (str(SOURCES), *sys.path)
"""Where hosts lie: a stack that cannot install one has its files alone, which nothing imports."""

DECLARED = {
    "Megatron-Bridge": (("megatron/bridge/training/config.py", "CheckpointConfig"), _OF_MEGATRON),
    "VeRL": (
        ("verl/workers/config/checkpoint.py", "McoreCheckpointConfig"),
        ("verl/trainer/config/config.py", "CheckpointConfig"),
    ),
}
"""The class that says a host's options, and the one that it inherits; see `declared`."""


def is_there(host: str) -> bool:
    """Whether the files of a host lie somewhere."""
    return all(_source(file) is not None for file, _ in DECLARED[host])


def declared(host: str) -> list[str]:
    """The options of a host, as its files declare them: nothing is imported.

    Raises:
        AssertionError: A class inherits another one than `DECLARED` says.
    """
    found, (first, *inherited) = list[str](), DECLARED[host]
    for (file, name), (_, base) in zip((first, *inherited), (*inherited, ("", "")), strict=True):
        source = _source(file)
        assert source is not None
        tree = ast.parse(source.read_text())
        [kind] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        bases = [ast.unparse(each) for each in kind.bases]
        assert not base or [each.removeprefix("MTrain") for each in bases] == [base], bases
        fields_of = [ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)]
        found += [each for each in fields_of if not each.startswith("_")]
    prefix = "checkpoint." if host == "Megatron-Bridge" else ""
    return [prefix + each for each in dict.fromkeys(found)]


def _source(file: str) -> Path | None:
    return next((path for place in PLACES if (path := Path(place, file)).is_file()), None)


def _version(package: str) -> str:
    [found, *_] = distributions(name=package, path=list(PLACES))
    return found.version


def differing(host: str, has: Iterable[str], *more: Option) -> list[str]:
    """Options that either a host or its table lacks, for the releases that are there."""
    table = {option.name for option in (*ENUMERATED[host], *more) if _is_in(option)}
    return sorted(table ^ set(has))


def _is_in(option: Option) -> bool:
    def reached(release: str) -> bool:
        package, _, number = release.partition(" ")
        return Version(_version(package)) >= Version(number)

    return (not option.since or reached(option.since)) and not (option.until and reached(option.until))


if __name__ == "__main__":
    if "--megatron-lm" in sys.argv:
        print(json.dumps(of_megatron_lm()))
    else:
        PAGE.write_text(page())

"""Writes docs/options.md from the tables of options:  python -m tests.options

With `--megatron-lm` it prints, as JSON, which options `megatron.training` has: importing that changes a process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from mbridge_fsdp_ckpt.bridge import options as bridge
from mbridge_fsdp_ckpt.hosts.options import Handling, Option
from mbridge_fsdp_ckpt.megatron_lm import options as megatron_lm
from mbridge_fsdp_ckpt.verl import options as verl

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

HEAD = """# Options of the frameworks

Written by `python -m tests.options` from the tables that the package checks a run's configuration against. A test
compares them with the options that the installed frameworks have
(`test_the_table_has_the_options_of_the_installed_release`).

- **obeyed**: means what it means in stock. Where the text names values that are refused, the others are obeyed.
- **in part**: works, but for what the text says; a warning says so where it is set.
- **refused**: an error before training begins, the same on every rank. It names all refused options at once.
- **no effect**: a warning, once, where it is set to something other than the framework's default.

An option that a later release adds is warned of where it is set.
"""
INTRODUCTIONS = {
    "Megatron-Bridge": "`ConfigContainer.validate` checks them, and each save and load refuses again.",
    "Megatron-LM": "`validate_args` checks them, and each save refuses again. `Settings` are given to "
    "`mbridge_fsdp_ckpt.megatron_lm.register`.",
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


def differing(host: str, has: Iterable[str], *more: Option) -> list[str]:
    """Options that either a host or its table lacks, for the releases that are installed."""
    table = {option.name for option in (*ENUMERATED[host], *more) if _is_in(option)}
    return sorted(table ^ set(has))


def _is_in(option: Option) -> bool:
    def reached(release: str) -> bool:
        package, _, number = release.partition(" ")
        return Version(version(package)) >= Version(number)

    return (not option.since or reached(option.since)) and not (option.until and reached(option.until))


if __name__ == "__main__":
    if "--megatron-lm" in sys.argv:
        print(json.dumps(of_megatron_lm()))
    else:
        PAGE.write_text(page())

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What errors tell users to do exists in the frontend that they use: every name of every remedy is looked up."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.loading.match import _REMEDY, WITHOUT_STATE
from mbridge_fsdp_ckpt.opening import REMEDIES
from mbridge_fsdp_ckpt.remedies import (
    NAMES,
    VARIABLE,
    Frontend,
    entry_point,
    frontend,
    inside,
    names_in,
    remedy,
    through,
)
from mbridge_fsdp_ckpt.saving.background.handle import SaveHandle
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools.command.app import application

PACKAGE = Path(mbridge_fsdp_ckpt.__file__).parent
OF_ONE_DOOR = ("bridge", "megatron_lm", "verl", "tools")
"""Folders that users of one frontend alone reach: integrations, and what commands do."""
OF_A_FRONTEND = re.compile(
    r"--[a-z][\w-]+|\b(?:checkpoint|ddp|optim|megatron|scheduler)\.\w+=|\ballow_\w+|\bload_\w+_only|\binclude="
    r"|\bvalues=|\bshare_reads\b|\bdcp_metadata\b|\bckpt_format\b|wait_until_taken|\bload_optim\b|\bsave_optim\b"
)


@functools.cache
def remedies() -> list[tuple[Path, int, ast.expr]]:
    """Every remedy in the package: where it is, and what it says."""
    return list(_remedies())


def _remedies() -> Iterator[tuple[Path, int, ast.expr]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                yield path.relative_to(PACKAGE), node.value.lineno, node.value


def folder_of(path: Path) -> str:
    """The folder below the package, or the integration."""
    return path.parts[1] if path.parts[0] == "integrations" else path.parts[0]


def texts(node: ast.AST) -> list[str]:
    """The literal texts of an expression."""
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def is_by_frontend(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "remedy"


def test_a_name_of_one_door_stands_in_the_table_alone() -> None:
    """Except in folders of one frontend, remedies are written with names in braces."""
    found = [
        f"{path}:{line}: {text}"
        for path, line, node in remedies()
        if folder_of(path) not in OF_ONE_DOOR and path.name != "settings.py"
        for text in texts(node)
        if OF_A_FRONTEND.search(re.sub(r"\{\w+\}", "", text) if is_by_frontend(node) else text)
    ]
    assert found == []


def test_every_name_in_braces_is_in_the_table() -> None:
    said = [text for _, _, node in remedies() if is_by_frontend(node) for text in texts(node)]
    said += [*_REMEDY, *WITHOUT_STATE, *(text for sentences in REMEDIES.values() for text in sentences)]
    assert len(said) > 40
    unknown = {name for text in said for name in names_in(text)} - NAMES.keys()
    assert unknown == set()


@pytest.mark.parametrize("here", list(Frontend))
def test_something_is_said_in_every_frontend(here: Frontend) -> None:
    by_frontend = [node for _, _, node in remedies() if is_by_frontend(node) and texts(node)]
    assert len(by_frontend) > 10
    for node in by_frontend:
        said = remedy(*texts(node), at=here)
        assert said, texts(node)
        assert "{" not in said
    for sentences in REMEDIES.values():
        assert remedy(*sentences, at=here)


def options() -> set[str]:
    """Of every command."""
    found: set[str] = set()
    waiting = [get_command(application())]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found


def commands() -> set[str]:
    top = get_command(application()).commands  # type: ignore[attr-defined]
    return {*top, *(f"convert {name}" for name in top["convert"].commands)}


def test_commands_and_their_options_exist() -> None:
    known = options()
    said = [(path, text) for path, _, node in remedies() if folder_of(path) == "tools" for text in texts(node)]
    said += [(Path("remedies"), names[at]) for names in NAMES.values() for at in names if at in EXPORT]
    said += [(Path("opening"), text) for sentences in REMEDIES.values() for text in sentences]
    known |= {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr"}  # torchrun's
    known.add("--list")  # of recipes
    named = {(str(path), option) for path, text in said for option in re.findall(r"--[a-z][\w-]+", text)}
    assert {(path, option) for path, option in named if option not in known} == set()
    verbs = {name for _, text in said for name in re.findall(r"mbridge_fsdp_ckpt ((?:convert )?[a-z-]+)", text)}
    assert {"convert from-torch-dist", "convert import", "repair"} <= verbs <= commands()


EXPORT = (Frontend.EXPORT, Frontend.COMMAND)


def test_python_names_exist() -> None:
    arguments = {*inspect.signature(checkpoint.save).parameters, *inspect.signature(checkpoint.load).parameters}
    for name, said in NAMES.items():
        text = said.get(Frontend.PYTHON, "")
        for setting in re.findall(r"Settings\((\w+)=", text):
            assert setting in {field.name for field in dataclasses.fields(Settings)}, name
        if re.fullmatch(r"include=|values=|optimizer=None", text):
            assert text.partition("=")[0] in arguments
        if text.startswith("load"):
            assert hasattr(checkpoint, text)
    assert hasattr(SaveHandle, NAMES["until_taken"][Frontend.PYTHON].removeprefix("SaveHandle.").removesuffix("()"))


@pytest.mark.bridge
def test_names_of_bridge_exist() -> None:
    from megatron.bridge.training.config import CheckpointConfig, OptimizerConfig, SchedulerConfig
    from megatron.core.distributed import DistributedDataParallelConfig

    kinds = {
        "checkpoint": CheckpointConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
        "scheduler": SchedulerConfig,
    }
    said = [names[Frontend.BRIDGE] for names in NAMES.values() if Frontend.BRIDGE in names]
    said += [text for path, _, node in remedies() if folder_of(path) == "bridge" for text in texts(node)]
    fields = [pair for text in said for pair in re.findall(r"\b(checkpoint|ddp|optimizer|scheduler)\.(\w+)", text)]
    assert len(fields) > 5
    for owner, field in fields:
        assert field in {one.name for one in dataclasses.fields(kinds[owner])}, f"{owner}.{field}"


@pytest.mark.bridge
def test_names_of_megatron_lm_exist() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    said = [names[Frontend.MEGATRON_LM] for names in NAMES.values() if Frontend.MEGATRON_LM in names]
    said += [text for path, _, node in remedies() if folder_of(path) == "megatron_lm" for text in texts(node)]
    named = {option for one in said for option in re.findall(r"--[a-z][\w-]+", one)}
    assert len(named) > 5
    known = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert named <= known._option_string_actions.keys()


def test_names_of_verl_exist() -> None:
    config = pytest.importorskip("verl.workers.config")
    known = {field.name for field in dataclasses.fields(config.McoreCheckpointConfig)}
    settings = {field.name for field in dataclasses.fields(Settings)}
    said = [names[Frontend.VERL] for names in NAMES.values() if Frontend.VERL in names]
    said += [text for path, _, node in remedies() if folder_of(path) == "verl" for text in texts(node)]
    fields = {name for text in said for name in re.findall(r"\bcheckpoint\.(\w+)", text)}
    assert {"load_contents", "mbridge_config"} <= fields <= known
    assert {name for text in said for name in re.findall(r"fsdp_dtensor_safe\.(\w+)", text)} <= settings


def test_the_outer_door_counts_and_threads_know_it() -> None:
    seen: list[Frontend] = []

    @entry_point(Frontend.PYTHON)
    def inner() -> None:
        seen.append(frontend())

    with through(Frontend.BRIDGE):
        inner()
        thread = threading.Thread(target=lambda: seen.append(frontend()))
        thread.start()
        thread.join()
    seen.append(frontend())  # an optimizer's step, after a save
    with through(Frontend.COMMAND), inside(Frontend.EXPORT), through(Frontend.BRIDGE):
        seen.append(frontend())
    inner()
    environment = {**os.environ, VARIABLE: Frontend.VERL}
    code = "from mbridge_fsdp_ckpt.remedies import frontend; print(frontend())"
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == Frontend.VERL
    assert seen == [Frontend.BRIDGE, Frontend.BRIDGE, Frontend.BRIDGE, Frontend.EXPORT, Frontend.PYTHON]


def test_remedies_of_keys_in_each_frontend() -> None:
    said = {here: remedy(*_REMEDY, at=here) for here in Frontend}
    assert "--not-strict lets tensors be absent" in said[Frontend.EXPORT]
    assert "allow_missing" not in said[Frontend.EXPORT]
    assert "load_optim" not in said[Frontend.EXPORT] + said[Frontend.VERL] + said[Frontend.PYTHON]
    assert "checkpoint.load_optim=False" in said[Frontend.BRIDGE]
    assert "--no-load-optim" in said[Frontend.MEGATRON_LM]
    assert "checkpoint.mbridge_config.fsdp_dtensor_safe.allow_missing" in said[Frontend.VERL]
    assert "Settings(allow_missing=...)" in said[Frontend.PYTHON]

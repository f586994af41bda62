# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Remedies in errors, with the options, arguments and commands of the frontend that the user works with.

One error reaches users of `save()` and `load()`, of Bridge's configuration, of Megatron-LM's arguments, of VeRL's, and
of the command line.  A remedy is written once, as sentences with names in braces.  `remedy` replaces each name by what
the frontend in use calls it, and leaves out sentences about what that frontend does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from string import Formatter


class Frontend(StrEnum):
    """The interface through which a user calls this package."""

    PYTHON = "save() and load()"
    BRIDGE = "Megatron-Bridge"
    MEGATRON_LM = "Megatron-LM"
    VERL = "VeRL"
    EXPORT = "the command convert export"
    COMMAND = "the command line"


_entered: ContextVar[Frontend | None] = ContextVar("frontend", default=None)
VARIABLE = "MBRIDGE_FSDP_CKPT_FRONTEND"
"""Environment variable of a checkpoint process: the frontend of the training process that started it."""
_last = next((each for each in Frontend if each == os.environ.get(VARIABLE)), Frontend.PYTHON)
"""The frontend that was used last, for other threads and optimizer steps: a job uses only one."""

_SETTINGS = [
    "allow_missing",
    "allow_unexpected",
    "allow_cast",
    "dcp_metadata",
    "share_reads",
    "time_limit",
    "storage_limit",
    "vocabulary_size",
]
_FRAMEWORKS = (Frontend.BRIDGE, Frontend.MEGATRON_LM)

NAMES: dict[str, dict[Frontend, str]] = {
    **{
        name: {
            Frontend.PYTHON: f"Settings({name}=...)",
            **dict.fromkeys(_FRAMEWORKS, f"register(Settings({name}=...))"),
            Frontend.VERL: f"checkpoint.mbridge_config.fsdp_dtensor_safe.{name}",
        }
        for name in _SETTINGS
    },
    "include": {Frontend.PYTHON: "include="},
    "values": {Frontend.PYTHON: "values="},
    "not_strict": {Frontend.EXPORT: "--not-strict"},
    "hf_model": {Frontend.EXPORT: "--hf-model"},
    "until_taken": {Frontend.PYTHON: "SaveHandle.wait_until_taken()"},
    "weights_only": {
        Frontend.PYTHON: "load_weights",
        Frontend.BRIDGE: "checkpoint.load_optim=False",
        Frontend.MEGATRON_LM: "--no-load-optim",
        Frontend.VERL: "checkpoint.load_contents=['model']",
    },
    "no_optimizer": {
        Frontend.PYTHON: "optimizer=None",
        Frontend.BRIDGE: "checkpoint.save_optim=False",
        Frontend.MEGATRON_LM: "--no-save-optim",
        Frontend.VERL: "checkpoint.save_contents=['model']",
    },
    "contents": {Frontend.VERL: "checkpoint.load_contents"},
    "step": {Frontend.BRIDGE: "checkpoint.ckpt_step", Frontend.MEGATRON_LM: "--ckpt-step"},
    "torch_dist": {
        Frontend.BRIDGE: "checkpoint.ckpt_format=torch_dist",
        Frontend.MEGATRON_LM: "--ckpt-format torch_dist",
        Frontend.VERL: "checkpoint.mbridge_config.ckpt_format=torch_dist",
    },
    "hugging_face": {Frontend.BRIDGE: "checkpoint.pretrained_checkpoint"},
    "megatron_fsdp": {
        Frontend.BRIDGE: "ddp.use_megatron_fsdp=True",
        Frontend.MEGATRON_LM: "--use-megatron-fsdp",
        Frontend.VERL: "megatron.use_megatron_fsdp=True",
    },
    "no_fp8_weights": {
        Frontend.PYTHON: "fp8_param_gather=False",
        Frontend.BRIDGE: "ddp.fp8_param_gather=False",
        Frontend.MEGATRON_LM: "no --fp8-param-gather",
    },
}
"""For each name in braces, what each frontend calls it; a frontend that is left out does not have it."""


@contextmanager
def through(frontend: Frontend) -> Iterator[None]:
    """Let errors in the block name the options of this frontend, unless an outer block has set another one."""
    global _last
    token = None if _entered.get() is not None else _entered.set(frontend)
    if token is not None and frontend not in (Frontend.COMMAND, Frontend.EXPORT):
        _last = frontend
    try:
        yield
    finally:
        if token is not None:
            _entered.reset(token)


@contextmanager
def inside(frontend: Frontend | None) -> Iterator[None]:
    """Let errors in the block name the options of this frontend, also if an outer block has set another one.

    Args:
        frontend: The frontend; None lets an inner block set it, as for a script that a command runs.
    """
    token = _entered.set(frontend)
    try:
        yield
    finally:
        _entered.reset(token)


def entry_point[**P, R](frontend: Frontend) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that users call through a frontend: its body runs in a block of `through`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def entered(*args: P.args, **kwargs: P.kwargs) -> R:
            with through(frontend):
                return function(*args, **kwargs)

        return entered

    return decorate


def frontend() -> Frontend:
    """The frontend in use, or, in other threads and optimizer steps, the one that was used last."""
    return _entered.get() or _last


def remedy(*sentences: str, at: Frontend | None = None) -> str:
    """The remedy of an error, with the names of the frontend in use.

    Args:
        sentences: The sentences of the remedy.  Each may have names of `NAMES` in braces; a sentence with a name that
            the frontend does not have is left out.
        at: The frontend; None means the one in use.
    """
    here = at or frontend()
    known: Mapping[str, str] = {name: by_frontend[here] for name, by_frontend in NAMES.items() if here in by_frontend}
    return " ".join(text.format_map(known) for text in sentences if names_in(text) <= known.keys())


def names_in(sentence: str) -> set[str]:
    """The names that a sentence has in braces."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name is not None}

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Remedies with the names of whoever reads them: options, arguments and commands that exist where the user came in.

One error reaches users of `save()` and `load()`, of Bridge's configuration, of Megatron-LM's arguments, of VeRL's, and
of the command line.  A remedy is written once, as sentences with names in braces; `remedy` puts in what each is called
at the door that is in use, and leaves out a sentence about what that door does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from string import Formatter


class Door(StrEnum):
    """Where a user came in."""

    PYTHON = "save() and load()"
    BRIDGE = "Megatron-Bridge"
    MEGATRON_LM = "Megatron-LM"
    VERL = "VeRL"
    EXPORT = "the command convert export"
    COMMAND = "the command line"


_entered: ContextVar[Door | None] = ContextVar("door", default=None)
VARIABLE = "MBRIDGE_FSDP_CKPT_DOOR"
"""Environment variable of a checkpoint process: the door of the training process that started it."""
_last = next((each for each in Door if each == os.environ.get(VARIABLE)), Door.PYTHON)
"""What another thread, or an optimizer's step, goes by: a job comes in by one door."""

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
_FRAMEWORKS = (Door.BRIDGE, Door.MEGATRON_LM)

NAMES: dict[str, dict[Door, str]] = {
    **{
        name: {
            Door.PYTHON: f"Settings({name}=...)",
            **dict.fromkeys(_FRAMEWORKS, f"register(Settings({name}=...))"),
            Door.VERL: f"checkpoint.mbridge_config.fsdp_dtensor_safe.{name}",
        }
        for name in _SETTINGS
    },
    "include": {Door.PYTHON: "include="},
    "values": {Door.PYTHON: "values="},
    "not_strict": {Door.EXPORT: "--not-strict"},
    "hf_model": {Door.EXPORT: "--hf-model"},
    "until_taken": {Door.PYTHON: "SaveHandle.wait_until_taken()"},
    "weights_only": {
        Door.PYTHON: "load_weights",
        Door.BRIDGE: "checkpoint.load_optim=False",
        Door.MEGATRON_LM: "--no-load-optim",
        Door.VERL: "checkpoint.load_contents=['model']",
    },
    "no_optimizer": {
        Door.PYTHON: "optimizer=None",
        Door.BRIDGE: "checkpoint.save_optim=False",
        Door.MEGATRON_LM: "--no-save-optim",
        Door.VERL: "checkpoint.save_contents=['model']",
    },
    "contents": {Door.VERL: "checkpoint.load_contents"},
    "step": {Door.BRIDGE: "checkpoint.ckpt_step", Door.MEGATRON_LM: "--ckpt-step"},
    "torch_dist": {
        Door.BRIDGE: "checkpoint.ckpt_format=torch_dist",
        Door.MEGATRON_LM: "--ckpt-format torch_dist",
        Door.VERL: "checkpoint.mbridge_config.ckpt_format=torch_dist",
    },
    "hugging_face": {Door.BRIDGE: "checkpoint.pretrained_checkpoint"},
    "megatron_fsdp": {
        Door.BRIDGE: "ddp.use_megatron_fsdp=True",
        Door.MEGATRON_LM: "--use-megatron-fsdp",
        Door.VERL: "megatron.use_megatron_fsdp=True",
    },
    "no_fp8_weights": {
        Door.PYTHON: "fp8_param_gather=False",
        Door.BRIDGE: "ddp.fp8_param_gather=False",
        Door.MEGATRON_LM: "no --fp8-param-gather",
    },
}
"""What each thing is called at each door; a door that is not there does not have it."""


@contextmanager
def through(door: Door) -> Iterator[None]:
    """Errors that are raised meanwhile name what this door has, unless the user came in by another one before."""
    global _last
    token = None if _entered.get() is not None else _entered.set(door)
    if token is not None and door not in (Door.COMMAND, Door.EXPORT):
        _last = door
    try:
        yield
    finally:
        if token is not None:
            _entered.reset(token)


@contextmanager
def inside(door: Door | None) -> Iterator[None]:
    """The same, whatever the user came in by before: one command of many, or None, a script that a command runs."""
    token = _entered.set(door)
    try:
        yield
    finally:
        _entered.reset(token)


def entrance[**P, R](door: Door) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a door; see `through`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def entered(*args: P.args, **kwargs: P.kwargs) -> R:
            with through(door):
                return function(*args, **kwargs)

        return entered

    return decorate


def door() -> Door:
    """The one by which the user came in, or did last."""
    return _entered.get() or _last


def remedy(*sentences: str, at: Door | None = None) -> str:
    """What the user can do, in the words of the door in use.

    Args:
        sentences: Each may have names of `NAMES` in braces; one whose names the door lacks is left out.
        at: Another door than the one in use.
    """
    here = at or door()
    known: Mapping[str, str] = {name: said[here] for name, said in NAMES.items() if here in said}
    return " ".join(text.format_map(known) for text in sentences if names_in(text) <= known.keys())


def names_in(sentence: str) -> set[str]:
    """The names in braces."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name is not None}

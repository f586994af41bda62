# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""How this package handles each option of a framework: obeyed, refused before training, or without effect.

Each integration has one table, in its `options.py`; docs/options.md is written from them.  Tests
compare their names with those that the installed frameworks have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME


class Handling(StrEnum):
    """How this package handles an option."""

    OBEYED = "obeyed"
    IN_PART = "in part"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a framework.

    Args:
        name: The name in the framework's configuration, dotted below its root.
        handling: How this package handles the option.
        text: One sentence or two: what the option does, why it is refused, or what happens instead.
        when: Takes a configuration and returns whether to refuse the option, or to warn of it.  None means never for an
            option that is obeyed, and for others whenever the value is not the framework's default.
        remedy: What a user can do where the option is refused.
        shown: The option as a user writes it; empty if that is the name.
        since: The first release of the framework that has the option, as "megatron-core 0.19"; empty if all supported
            releases have it.
        until: The first release without the option; empty if all supported releases have it.
    """

    name: str
    handling: Handling
    text: str
    when: Callable[[Any], bool] | None = None
    remedy: str = ""
    shown: str = ""
    since: str = ""
    until: str = ""

    @property
    def written(self) -> str:
        """The option as a user writes it."""
        return self.shown or self.name


class Given(NamedTuple):
    """The value of an option in a configuration, and the framework's default."""

    value: Any
    default: Any


def given_by(owner: Any, prefix: str = "") -> dict[str, Given]:
    """The fields of a framework's dataclass by dotted name, without private fields.

    Args:
        owner: The dataclass.
        prefix: Put before each name.
    """
    found = {}
    for each in fields(owner):
        if not each.name.startswith("_"):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            found[prefix + each.name] = Given(getattr(owner, each.name, default), default)
    return found


def check(
    config: Any, given: Mapping[str, Given], table: Sequence[Option], written: Callable[[str, Any], str]
) -> list[str]:
    """Refuse options that the format does not support.

    Args:
        config: The framework's configuration, which is passed to `Option.when`.
        given: The values of the options.
        table: How each option is handled.
        written: Takes an option as a user writes it and its value, and returns the text of the setting.

    Returns:
        One warning for each setting that has no effect, or that this release does not know.

    Raises:
        ConfigurationError: Some options are refused; the error names all of them.
    """
    rows = {option.name: option for option in table}
    counted = [
        (rows[name], found.value)
        for name, found in given.items()
        if name in rows and _counts(rows[name], config, found)
    ]
    refused = [(option, value) for option, value in counted if option.handling in (Handling.OBEYED, Handling.REFUSED)]
    if refused:
        raise ConfigurationError(
            expected=f"options that {FORMAT_NAME} supports",
            found=", ".join(written(option.written, value) for option, value in refused),
            remedy=" ".join(dict.fromkeys(f"{option.text} {option.remedy}" for option, _ in refused)),
        )
    said = [_warning(option, written(option.written, value)) for option, value in counted]
    unknown = [
        (name, found.value) for name, found in given.items() if name not in rows and found.value != found.default
    ]
    return said + [
        f"{written(name, value)}: this release of mbridge_fsdp_ckpt does not know that option, and may not obey it"
        for name, value in unknown
    ]


def _counts(option: Option, config: Any, given: Given) -> bool:
    if option.when is not None:
        return option.when(config)
    return option.handling is not Handling.OBEYED and bool(given.value != given.default)


def _warning(option: Option, setting: str) -> str:
    if option.handling is Handling.IN_PART:
        return f"{setting} with {FORMAT_NAME}: {option.text}"
    return f"{setting} has no effect with {FORMAT_NAME}: {option.text}"


_warned: set[str] = set()


def warn_once(texts: Iterable[str]) -> None:
    """Warn of each text once in a process."""
    for text in texts:
        if text not in _warned:
            warn(text)
        _warned.add(text)


def warn(text: str) -> None:
    """Print on rank 0, as frameworks print their warnings: both drop log records of the level WARNING by default."""
    if _rank() == 0:
        print(f"WARNING: {text}", flush=True)


def forget() -> None:
    """Forget which texts were printed, so that each is printed again."""
    _warned.clear()


def _rank() -> int:
    """This process's rank, from the launcher's variables before there is a process group."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def check_fills(*, skips: bool) -> None:
    """Refuse a load that does not fill the model; the frameworks ask for it where torch's FSDP2 has filled it before.

    Args:
        skips: The argument `skip_load_to_model_and_opt`.

    Raises:
        ConfigurationError: The argument is set.
    """
    if skips:
        raise ConfigurationError(
            expected=f"a load that fills model and optimizer, the only kind of load that {FORMAT_NAME} supports",
            found="skip_load_to_model_and_opt=True",
            remedy="Leave that argument out.",
        )


RERUN = "The state of the rerun state machine is not kept in a checkpoint, as in stock fsdp_dtensor."


def warn_of_rerun() -> None:
    """Warn that a job which resumes from this checkpoint does not repeat a step, where Megatron expects it to."""
    from megatron.core import rerun_state_machine

    machine = getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is not None and machine.state is not rerun_state_machine.RerunState.NOT_RUNNING_YET:
        warn_once([f"{RERUN} A job that resumes from this one does not repeat the step whose result is in doubt."])

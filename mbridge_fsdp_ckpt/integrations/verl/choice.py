# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint configuration of VeRL asks for this format, and with which settings."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.settings import Settings

VARIABLE = "MBRIDGE_FSDP_CKPT_VERL_FORMAT"
"""Environment variable with the format of every checkpoint configuration that names none itself."""

KEY = "ckpt_format"


@dataclass(frozen=True, slots=True)
class Choice:
    """This format was asked for.

    Args:
        said: Where, as a user would write it.
        settings: What the user chose for saves and loads.
        by_takeover: Whether only runs under Megatron-FSDP are meant, and others go on as they are.
    """

    said: str
    settings: Settings
    by_takeover: bool = False


def choice_of(checkpoint_config: Any) -> Choice | None:
    """What a checkpoint configuration, or else the environment, asks for; None where it is not this format.

    Args:
        checkpoint_config: VeRL's `McoreCheckpointConfig`, a mapping in its shape, or None.

    Raises:
        UnknownFormatError: A name that looks like a misspelt one.
        ConfigurationError: The name stands under another key, or a setting is unknown.
    """
    options = _options(checkpoint_config)
    _check_keys(options)
    name, said = options.get(KEY), f"checkpoint.mbridge_config.{KEY}={options.get(KEY)}"
    if name is None:
        name = os.environ.get(VARIABLE) or None
        said = f"{VARIABLE}={name}"
    if name == FORMAT_NAME:
        return Choice(said, _settings(options.get(FORMAT_NAME)))
    from mbridge_fsdp_ckpt.integrations.bridge.choice import TAKEOVER, check_format, takeover_by_environment

    if name in (
        None,
        STOCK_FORMAT,
    ):  # all that VeRL itself has under Megatron-FSDP, which needs no name
        return Choice(f"{TAKEOVER}=1", _settings(options.get(FORMAT_NAME)), True) if takeover_by_environment() else None
    check_format(name)
    return None


def _options(checkpoint_config: Any) -> Mapping[str, Any]:
    """`mbridge_config`; VeRL has it in Megatron's checkpoint configuration alone."""
    if isinstance(checkpoint_config, Mapping):
        return checkpoint_config.get("mbridge_config") or {}
    return getattr(checkpoint_config, "mbridge_config", None) or {}


def _check_keys(options: Mapping[str, Any]) -> None:
    """VeRL ignores a key that it does not know: a misspelt one would go unnoticed."""
    for key, value in options.items():
        if key != KEY and value == FORMAT_NAME:
            raise ConfigurationError(
                expected=f"checkpoint.mbridge_config.{KEY}={FORMAT_NAME}",
                found=f"checkpoint.mbridge_config.{key}={value}",
                remedy=f"Write {KEY}.",
            )


def _settings(given: Any) -> Settings:
    from mbridge_fsdp_ckpt.settings import Settings

    where, known = f"checkpoint.mbridge_config.{FORMAT_NAME}", [field.name for field in dataclasses.fields(Settings)]
    if given is None:
        return Settings()
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            expected=f"{where} to hold settings", found=repr(given), remedy=f"Write {where}.time_limit=600, say."
        )
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            raise ConfigurationError(
                expected=f"one of {', '.join(known)} in {where}",
                found=repr(name),
                remedy=f"Did you mean {near[0]!r}?" if near else "Leave it out.",
            )
    return Settings(**{name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    """Patterns come as a list of some kind; `Settings` holds tuples."""
    return value if isinstance(value, str | int | float | None) else tuple(value)

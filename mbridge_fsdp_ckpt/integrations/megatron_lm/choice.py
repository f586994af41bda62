# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which runs of Megatron-LM are ours, and with which settings."""

from __future__ import annotations

import argparse
from typing import Any

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.integrations.common.options import check
from mbridge_fsdp_ckpt.integrations.megatron_lm.options import ELSEWHERE, OPTIONS, given
from mbridge_fsdp_ckpt.settings import Settings

_settings = Settings()
_takeover = False


def use(settings: Settings | None = None, *, takeover: bool | None = None) -> None:
    """Set how every save and load of `megatron.training` is made from here on.

    Args:
        settings: The settings of saves and loads.  None keeps those in use.
        takeover: Whether runs with `--ckpt-format fsdp_dtensor` are saved and loaded by this package, too.  None keeps
            what was chosen.
    """
    global _settings, _takeover
    _settings = _settings if settings is None else settings
    _takeover = _takeover if takeover is None else takeover


def settings_in_use() -> Settings:
    """The registered settings."""
    return _settings


def is_ours(ckpt_format: Any) -> bool:
    """Whether this package saves and loads a run with this `--ckpt-format`."""
    return ckpt_format == FORMAT_NAME or (_takeover and ckpt_format == STOCK_FORMAT)


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Refuse options that the format does not support, before training begins.

    Returns:
        One warning for each option that has no effect.

    Raises:
        ConfigurationError: An option is given that the format does not support.
    """
    return check(args, given(args), (*OPTIONS, *ELSEWHERE), _written)


def _written(flag: str, value: Any) -> str:
    return flag if isinstance(value, bool) else f"{flag} {value}"

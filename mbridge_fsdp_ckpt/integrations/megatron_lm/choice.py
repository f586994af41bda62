# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which runs of Megatron-LM are ours, and with which settings."""

from __future__ import annotations

import argparse
from typing import Any

from mbridge_fsdp_ckpt.integrations.common.options import check
from mbridge_fsdp_ckpt.integrations.megatron_lm.options import ELSEWHERE, OPTIONS, given
from mbridge_fsdp_ckpt.settings import Settings

_settings = Settings()


def use(settings: Settings) -> None:
    """From here on, every save and load of `megatron.training` is made with these."""
    global _settings
    _settings = settings


def settings_in_use() -> Settings:
    """The registered settings."""
    return _settings


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Refuse what the format cannot do, before training begins; the result says what has no effect.

    Raises:
        ConfigurationError: One of these options is given.
    """
    return check(args, given(args), (*OPTIONS, *ELSEWHERE), _written)


def _written(flag: str, value: Any) -> str:
    return flag if isinstance(value, bool) else f"{flag} {value}"

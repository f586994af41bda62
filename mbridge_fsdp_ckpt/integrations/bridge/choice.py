# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which runs of Megatron-Bridge are ours, and with which settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError, UnknownFormatError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.integrations.bridge.options import OPTIONS, given
from mbridge_fsdp_ckpt.integrations.common.options import check
from mbridge_fsdp_ckpt.settings import Settings

TAKEOVER = "MBRIDGE_FSDP_CKPT_TAKEOVER"
"""Environment variable: "1" is `register(takeover=True)`."""

_KNOWN = ("torch_dist", STOCK_FORMAT, FORMAT_NAME, "torch", "torch_dcp", "zarr")

_settings = Settings()
_takeover = False


def use(settings: Settings | None = None, *, takeover: bool | None = None) -> None:
    """Set how runs are saved and loaded from here on.

    Args:
        settings: The settings of saves and loads.  None keeps those in use.
        takeover: Whether to take over runs that name the stock format.  None keeps what was chosen.
    """
    global _settings, _takeover
    _settings = _settings if settings is None else settings
    _takeover = _takeover if takeover is None else takeover


def settings_in_use() -> Settings:
    """The registered settings."""
    return _settings


def is_ours(ckpt_format: Any) -> bool:
    """Whether this package saves and loads a run with this format."""
    return ckpt_format == FORMAT_NAME or (_takeover and ckpt_format == STOCK_FORMAT)


def takeover_by_environment() -> bool:
    """Whether the environment variable MBRIDGE_FSDP_CKPT_TAKEOVER asks for a takeover.

    Raises:
        ConfigurationError: The variable is neither 0 nor 1.
    """
    value = os.environ.get(TAKEOVER, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(
            expected=f"the environment variable {TAKEOVER} to be 0 or 1", found=repr(value), remedy="Set it to 1."
        )
    return value == "1"


def settings_of(cfg: Any) -> Settings:
    """The registered settings for a run.

    A run that keeps no optimizer state may also load without.  The size of a padded vocabulary is the model's, unless
    the user gave one.
    """
    settings = _settings.for_vocabulary(tokens_of(cfg.model))
    return settings if cfg.checkpoint.save_optim else settings.without_optimizer()


def tokens_of(provider: Any) -> int | None:
    """The number of tokens of a vocabulary that Bridge pads; None if it does not pad it."""
    return provider.vocab_size if getattr(provider, "should_pad_vocab", False) else None


@contextmanager
def presented_as_stock(checkpoint: Any) -> Iterator[None]:
    """Show Bridge's code the stock format's name in the block, in place of this format's.

    With that name Bridge requires a persistent worker for asynchronous saves, so that is set, too; ours do not use it.
    """
    given_by_user = checkpoint.ckpt_format, checkpoint.use_persistent_ckpt_worker
    checkpoint.ckpt_format, checkpoint.use_persistent_ckpt_worker = STOCK_FORMAT, True
    try:
        yield
    finally:
        checkpoint.ckpt_format, checkpoint.use_persistent_ckpt_worker = given_by_user


def check_format(name: Any) -> None:
    """Refuse a misspelt format name.

    Raises:
        UnknownFormatError: The name is unknown, and similar to a known one.
    """
    if name in _KNOWN:
        return
    near = difflib.get_close_matches(str(name), _KNOWN, 1, 0.75)
    if near:
        raise UnknownFormatError(
            expected=f"checkpoint.ckpt_format to be one of {', '.join(_KNOWN[:3])}",
            found=repr(name),
            remedy=f"Did you mean {near[0]!r}?",
        )


def check_settings(cfg: Any) -> list[str]:
    """Refuse settings that the format does not support, before training begins.

    Args:
        cfg: Bridge's `ConfigContainer`.

    Returns:
        One warning for each setting that has no effect.

    Raises:
        ConfigurationError: Some settings are refused.
    """
    return check(cfg, given(cfg), OPTIONS, lambda name, value: f"{name}={value!r}")

"""Which runs of Megatron-LM are ours, and with which settings."""

from __future__ import annotations

import argparse

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME

_settings = Settings()


def use(settings: Settings) -> None:
    """From here on, every save and load of `megatron.training` is made with these."""
    global _settings
    _settings = settings


def settings_in_use() -> Settings:
    """The registered settings."""
    return _settings


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what the format cannot do yet, before training begins.

    Raises:
        ConfigurationError: One of these options is given.
    """
    for option, present in (
        ("--logits-save-dir", getattr(args, "logits_save_dir", None) is not None),  # new in 0.19
        (f"--non-persistent-ckpt-type {args.non_persistent_ckpt_type}", args.non_persistent_ckpt_type is not None),
        ("--use-checkpoint-args", args.use_checkpoint_args),
        ("--override-ckpt-iteration", getattr(args, "override_ckpt_iteration", None) is not None),  # new in 0.19
    ):
        if present:
            raise ConfigurationError(
                expected=f"options that --ckpt-format {FORMAT_NAME} supports",
                found=option,
                remedy="Remove that option.",
            )

"""`register()`: Megatron-Bridge learns the format name `fsdp_dtensor_safe`.

The training loop's checkpoints go through Bridge's own plug-in point, `checkpoint.custom_manager_class`.  Where that
does not reach, these are replaced, here and nowhere else, and only act for our format name (and, where a user asks for
a takeover, for the stock one):

    ConfigContainer.validate                         knows three format names by heart; sets custom_manager_class
    checkpointing.save_checkpoint                    called directly by save_megatron_model and by users
    checkpointing._load_checkpoint_from_path         called by load_checkpoint and by Bridge's set-up
    optim.sync_hybrid_device_optimizer_...           assumes a distributed optimizer without Megatron-FSDP

megatron-core itself is corrected in corrections.py.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mbridge_fsdp_ckpt import FORMAT_NAME, STOCK_FORMAT, corrections
from mbridge_fsdp_ckpt.errors import ConfigurationError, UnknownFormatError
from mbridge_fsdp_ckpt.patching import Patches, rebind_everywhere
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.versions import require

TAKEOVER = "MBRIDGE_FSDP_CKPT_TAKEOVER"
"""Environment variable: "1" is `register(takeover=True)`."""

MANAGER = "mbridge_fsdp_ckpt.bridge.manager.SafeCheckpointManager"
_KNOWN = ("torch_dist", STOCK_FORMAT, FORMAT_NAME, "torch", "torch_dcp", "zarr")

_patches: Patches | None = None
_settings = Settings()
_takeover = False


def register(settings: Settings | None = None, *, takeover: bool | None = None) -> None:
    """Make `checkpoint.ckpt_format=fsdp_dtensor_safe` work in Megatron-Bridge.

    Calling it again changes nothing but what is given.

    Args:
        settings: Time limit and the like, for every save and load through Bridge.
        takeover: Whether runs that say `fsdp_dtensor` are saved and loaded here, too, and need no other change. By
            default what the environment variable MBRIDGE_FSDP_CKPT_TAKEOVER says.

    Raises:
        UnsupportedVersionError: torch, megatron-core or megatron-bridge is of a version this was not made for.
        ConfigurationError: The environment variable is neither 0 nor 1.
    """
    global _patches, _settings, _takeover
    if takeover is None and _patches is None:
        takeover = takeover_by_environment()
    if settings is not None:
        _settings = settings
    if takeover is not None:
        _takeover = takeover
    if _patches is not None:
        return
    require("torch", "megatron-core", "megatron-bridge")
    patches = Patches()
    try:
        corrections.apply(__name__)
        _patch(patches)
    except BaseException:
        patches.undo()
        _disallow()
        corrections.withdraw(__name__)
        raise
    _patches = patches


def unregister() -> None:
    """Put everything back as it was.  Does nothing unless registered."""
    global _patches, _settings, _takeover
    if _patches is not None:
        _patches.undo()
        _disallow()
        corrections.withdraw(__name__)
        _patches, _settings, _takeover = None, Settings(), False


def is_ours(ckpt_format: Any) -> bool:
    """Whether a run that says this format is saved and loaded here."""
    return ckpt_format == FORMAT_NAME or (_takeover and ckpt_format == STOCK_FORMAT)


def takeover_by_environment() -> bool:
    """Whether the environment asks for a takeover.

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
    """The size of a vocabulary that Bridge pads; None where it doesn't."""
    return provider.vocab_size if getattr(provider, "should_pad_vocab", False) else None


def _patch(patches: Patches) -> None:
    from megatron.bridge.training import checkpointing, optim
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    from mbridge_fsdp_ckpt.bridge import conversion_seams, manager
    from mbridge_fsdp_ckpt.bridge.export_fix import correct_export
    from mbridge_fsdp_ckpt.bridge.full_dim_norms import mark_as_sharded

    target_allowlist.add_exact(MANAGER)  # Bridge's prefixes would let a checkpoint name everything below them
    patches.set(ConfigContainer, "validate", _validate(ConfigContainer.validate))
    save, load = checkpointing.save_checkpoint, checkpointing._load_checkpoint_from_path
    sync = optim.sync_hybrid_device_optimizer_fp32_master_copies
    replacements = [
        (save, _routed(save, manager.save_checkpoint)),
        (load, _routed(load, manager.load_from_path)),
        (sync, _sync_copies(sync)),
        *conversion_seams.replacements(is_ours),
    ]
    correct_export(patches)
    mark_as_sharded(patches)
    rebind_everywhere(patches, replacements)


def _disallow() -> None:
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    target_allowlist.remove_exact(MANAGER)


def _routed(stock: Callable[..., Any], safe: Callable[..., Any]) -> Callable[..., Any]:
    """Call ours for our format, Bridge's otherwise.  Both take the state by name or as the argument that has cfg."""

    @functools.wraps(stock)
    def routed(*args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state") or next(arg for arg in args if hasattr(arg, "cfg"))
        check_format(state.cfg.checkpoint.ckpt_format)
        return (safe if is_ours(state.cfg.checkpoint.ckpt_format) else stock)(*args, **kwargs)

    return routed


def _validate(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def validate(config: Any) -> None:
        checkpoint = config.checkpoint
        check_format(checkpoint.ckpt_format)
        if not is_ours(checkpoint.ckpt_format):
            stock(config)
            return
        check_settings(checkpoint)
        checkpoint.custom_manager_class = MANAGER
        with presented_as_stock(checkpoint):
            stock(config)

    return validate


@contextmanager
def presented_as_stock(checkpoint: Any) -> Iterator[None]:
    """Let Bridge's code that compares format names take our format for the stock one."""
    said, checkpoint.ckpt_format = checkpoint.ckpt_format, STOCK_FORMAT
    try:
        yield
    finally:
        checkpoint.ckpt_format = said


def check_format(name: Any) -> None:
    """Catch a misspelt format name.

    Raises:
        UnknownFormatError: Nobody knows it, and it looks like one that is known.
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


def check_settings(checkpoint: Any) -> None:
    """Refuse what the format cannot do yet, before training begins.

    Raises:
        ConfigurationError: async_save, local non-persistent checkpoints, or another custom manager.
    """
    refused = {
        "async_save=True": checkpoint.async_save,
        "non_persistent_ckpt_type='local'": checkpoint.non_persistent_ckpt_type == "local",
        f"custom_manager_class={checkpoint.custom_manager_class!r}": checkpoint.custom_manager_class
        not in (None, MANAGER),
    }
    for setting, present in refused.items():
        if present:
            raise ConfigurationError(
                expected=f"settings that {FORMAT_NAME} supports",
                found=f"checkpoint.{setting}",
                remedy="Remove that setting, or use another ckpt_format.",
            )


def _sync_copies(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    from mbridge_fsdp_ckpt.optimizer_state.sharded_hybrid import ShardedHybridDeviceOptimizer

    @functools.wraps(stock)
    def sync(optimizer: Any) -> bool:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        under_fsdp = [p for p in parts if getattr(getattr(p, "ddp_config", None), "use_megatron_fsdp", False)]
        if not under_fsdp:
            return stock(optimizer)
        hybrid = [p.optimizer for p in under_fsdp if isinstance(p.optimizer, ShardedHybridDeviceOptimizer)]
        for inner in hybrid:
            inner.update_fp32_param_by_new_param()
        return bool(hybrid)

    return sync

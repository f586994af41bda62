# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Loss scales of Megatron's fp16 optimizers: state of an optimizer that belongs to no parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError, ManifestError
from mbridge_fsdp_ckpt.live.optimizer.adapters import grad_scalers
from mbridge_fsdp_ckpt.remedies import remedy

NAME = "grad_scaler"
"""What Megatron's checkpoints call it among a checkpoint's values."""


def with_loss_scales(values: Mapping[str, Any] | None, optimizer: Any) -> Mapping[str, Any]:
    """What a save is given, and the states of the optimizer's loss scalers; without fp16 there are none."""
    scalers = grad_scalers(optimizer) if optimizer is not None else []
    states = {NAME: {str(index): scaler.state_dict() for index, scaler in enumerate(scalers)}} if scalers else {}
    return {**(values or {}), **states}


def check_name(values: Mapping[str, Any] | None, optimizer: Any) -> None:
    """Refuse a value of a save that has the name of the optimizer's loss scales, and is something else.

    Raises:
        ConfigurationError: There is one.
    """
    if not values or NAME not in values:
        return
    own = with_loss_scales(None, optimizer).get(NAME)
    if own is not None and values[NAME] not in (own, *own.values()):
        raise ConfigurationError(
            expected=f"values without {NAME!r}, under which the loss scales of the optimizer are saved",
            found="another value under this name",
            remedy=f"Leave {NAME!r} out of values, or give the value another name.",
        )


def restoration(values: Mapping[str, Any], optimizer: Any) -> Callable[[], None]:
    """What puts saved loss scales in place; they are checked here.

    Nothing where the checkpoint has none, as one of bf16 training, or the optimizer needs none.

    Raises:
        ManifestError: They are not what a loss scaler of this kind saves.
        ConfigurationError: There are several that differ, and not as many as the optimizer has.
    """
    scalers, saved = grad_scalers(optimizer) if optimizer is not None else [], values.get(NAME)
    if not scalers or not saved:
        return _nothing
    numbered = isinstance(saved, Mapping) and all(str(name).isdigit() for name in saved)
    states = list(saved.values()) if numbered else [saved]  # a caller may have saved the only one under this name
    if len(states) != len(scalers):
        if any(state != states[0] for state in states):
            raise ConfigurationError(
                expected=f"the loss scales of {len(scalers)} optimizers",
                found=f"different ones of {len(states)}",
                remedy="Resume with as many optimizers (dense and expert parameters) as were saved.",
                key=NAME,
            )
        states = states[:1] * len(scalers)
    for scaler, state in zip(scalers, states, strict=True):
        _check(scaler, state)
    loads = [partial(scaler.load_state_dict, state) for scaler, state in zip(scalers, states, strict=True)]

    def restore() -> None:
        for load in loads:
            load()

    return restore


def _check(scaler: Any, state: Any) -> None:
    try:
        copy.deepcopy(scaler).load_state_dict(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ManifestError(
            expected=f"the state of a {type(scaler).__name__}",
            found=f"{type(error).__name__}: {error}",
            remedy=remedy(
                "Resume with the kind of loss scaling that was saved.", "Or load weights alone, with {weights_only}."
            ),
            key=NAME,
        ) from error


def _nothing() -> None:
    """What puts in place nothing."""

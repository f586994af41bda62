"""What a field of a configuration may hold, told by its type: YAML knows neither enums nor dtypes."""

from __future__ import annotations

import difflib
import enum
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError

CHOICES = {
    "ddp.data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ddp.outer_dp_sharding_strategy": ("no_shard", "optim"),
}
"""Fields that are plain strings to Megatron-Core, which looks at their values much later."""

_ABSENT = object()
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


def fitted(name: str, owner: Any, field: str, value: Any) -> Any:
    """`value`, as `owner.field` holds it.

    Args:
        name: The field's dotted name.
        owner: A dataclass.
        field: One of its fields.
        value: From YAML.

    Raises:
        ConfigurationError: The field can't hold it.  Names what it can hold, and the nearest choice.
    """
    present = getattr(owner, field)
    if value is None and present is None:
        return None
    kinds, named = list(_alternatives(_hint(owner, field), present)), _named_choices(name)
    for kind in kinds:
        converted = _converted(kind, value)
        if converted is not _ABSENT and (not named or value in named):
            return converted
    choices = list(named) or [choice for kind in kinds for choice in _choices(kind)]
    near = difflib.get_close_matches(str(value), choices, 1)
    raise ConfigurationError(
        expected=f"one of {', '.join(choices)}" if choices else " or ".join(_words(kinds)),
        found=repr(value),
        remedy=f"Did you mean {near[0]}?" if near else f"Its value in the recipe is {present!r}.",
        key=name,
    )


def _named_choices(name: str) -> Sequence[str]:
    if name == "mixed_precision":
        bridge = sys.modules.get("megatron.bridge.training.mixed_precision")
        return tuple(getattr(bridge, "MIXED_PRECISION_RECIPES", ()))
    return CHOICES.get(name, ())


def _hint(owner: Any, field: str) -> Any:
    """The field's type as its class declares it; Any where that names what can't be found at run time."""
    try:
        return typing.get_type_hints(type(owner)).get(field, Any)
    except (NameError, TypeError):
        return Any


def _alternatives(hint: Any, present: Any) -> Iterator[Any]:
    """The types that a hint allows, one by one; the present value's own, where the hint is of no help."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for argument in typing.get_args(hint):
            yield from _alternatives(argument, present)
    elif hint is Any and present is not None:
        yield type(present)
    else:
        yield hint


def _converted(kind: Any, value: Any) -> Any:
    """The value as one of this type; `_ABSENT` where it can't be."""
    kind, allowed = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is typing.Literal:
        return value if value in allowed else _ABSENT
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return value  # the user knows better
    if issubclass(kind, enum.Enum):
        return kind.__members__.get(value, _ABSENT) if isinstance(value, str) else _ABSENT
    if kind.__name__ == "dtype":
        return _dtypes().get(str(value).removeprefix("torch."), _ABSENT)
    if kind in (int, float):
        return _number(kind, value)
    if issubclass(kind, Path):
        return kind(value) if isinstance(value, str) else _ABSENT
    if kind is tuple:
        return tuple(value) if isinstance(value, list) else _ABSENT
    return value if isinstance(value, kind) else _ABSENT


def _number(kind: type, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _ABSENT
    return kind(value) if kind(value) == value else _ABSENT


def _dtypes() -> dict[str, Any]:
    import torch

    return {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def _choices(kind: Any) -> Iterable[str]:
    if typing.get_origin(kind) is typing.Literal:
        return map(str, typing.get_args(kind))
    if not isinstance(kind, type):
        return ()
    if issubclass(kind, enum.Enum):
        return kind.__members__
    if kind.__name__ == "dtype":
        return ("float32", "bfloat16", "float16")
    return ("true", "false") if kind is bool else ()


def _words(kinds: Iterable[Any]) -> list[str]:
    names = (_WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
    return list(dict.fromkeys(names))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a field of a configuration may hold, told by its type: YAML knows neither enums nor dtypes."""

from __future__ import annotations

import difflib
import enum
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, PlainValidator, Strict, TypeAdapter, ValidationError

from mbridge_fsdp_ckpt.errors import ConfigurationError

CHOICES = {
    "ddp.data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ddp.outer_dp_sharding_strategy": ("no_shard", "optim"),
}
"""Fields that are plain strings to Megatron-Core, which looks at their values much later."""

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
    for kind in kinds if not named or value in named else ():
        with suppress(ValidationError):
            return TypeAdapter(_checked(kind)).validate_python(value)
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


def _checked(kind: Any) -> Any:
    """The type as pydantic is to check it: enums and dtypes by name, numbers and texts as they are written."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return kind
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_checked, arguments))]  # noqa: UP007 - the members are known at run time alone
    if origin in (list, tuple, dict):
        return types.GenericAlias(origin, tuple(inner if inner is ... else _checked(inner) for inner in arguments))
    kind = origin or kind
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return Any  # the user knows better
    if issubclass(kind, enum.Enum):
        return Annotated[Any, PlainValidator(partial(_named, kind.__members__))]
    if kind.__name__ == "dtype":
        return Annotated[Any, PlainValidator(lambda name: _named(_dtypes(), str(name).removeprefix("torch.")))]
    if kind is int:
        return Annotated[int, Strict(), BeforeValidator(_whole)]
    if kind in (bool, float, str):
        return Annotated[kind, Strict()]
    if issubclass(kind, (Path, list, tuple, dict, type(None))):
        return kind
    return InstanceOf[kind]  # type: ignore[misc]  # which type it is, is known at run time alone


def _named(members: Mapping[str, Any], name: Any) -> Any:
    if not isinstance(name, str) or name not in members:
        raise ValueError("no such name")
    return members[name]


def _whole(value: Any) -> Any:
    """1e3 is an integer to whoever writes YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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

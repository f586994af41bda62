# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Settings by dotted name, from arguments and YAML files into Megatron-Bridge's configuration.

Bridge has such overrides too, but those answer a misspelt name or format with a traceback, and late.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError
from recipes.fields import fitted

FORMAT = "checkpoint.ckpt_format"
ALIASES = {"checkpoint.format": FORMAT}

_SUBJECT = "each override to be key=value, with the key a dotted name such as train.train_iters"


def from_arguments(assignments: Sequence[str]) -> dict[str, Any]:
    """The settings of `key=value` arguments, by their names in the configuration.

    Raises:
        ConfigurationError: Not of that form, not YAML, or one setting with two values.
        UnknownFormatError: A misspelt checkpoint format.
    """
    return _settings(_split(assignment) for assignment in assignments)


def from_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML file that maps dotted names to values.

    Raises:
        ConfigurationError: The file can't be read, isn't such a mapping, or gives one setting two values.
        UnknownFormatError: A misspelt checkpoint format.
    """
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # the YAML parser's errors and OmegaConf's have no base in common
        raise ConfigurationError(
            expected="a YAML file of overrides",
            found=f"{type(error).__name__}: {error}",
            remedy="Give a file that maps dotted names to values, one a line.",
            key=str(path),
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            expected="a YAML file that maps dotted names to values",
            found=f"a {type(content).__name__}",
            remedy="Write `train.train_iters: 10`, one setting a line.",
            key=str(path),
        )
    return _settings((str(name), value) for name, value in content.items())


def apply(config: Any, settings: Mapping[str, Any]) -> None:
    """Set fields of a configuration made of dataclasses.  Nothing is changed unless all can be.

    Raises:
        ConfigurationError: A name that the configuration doesn't have, or a value that its field can't hold.
    """
    found = [(name, *_owner(config, name), value) for name, value in settings.items()]
    ready = [(owner, field, _fitted(name, owner, field, value)) for name, owner, field, value in found]
    for owner, field, value in ready:
        setattr(owner, field, value)


def _split(assignment: str) -> tuple[str, Any]:
    from omegaconf import OmegaConf

    name, equals, text = assignment.partition("=")
    if not name or not equals:
        raise ConfigurationError(
            expected=_SUBJECT, found=repr(assignment), remedy="Write it without spaces around the equals sign."
        )
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except Exception as error:  # the YAML parser's errors and OmegaConf's have no base in common
        raise ConfigurationError(
            expected="a value in YAML", found=repr(text), remedy=f"Quote it: {error}", key=name
        ) from error
    assert isinstance(value, dict)
    return name, value["value"]


def _settings(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Names in the configuration for what the user wrote; the checkpoint format is checked at once."""
    settings: dict[str, Any] = {}
    written: dict[str, str] = {}
    for given, value in pairs:
        name = ALIASES.get(given, given)
        if name in settings and settings[name] != value:
            raise ConfigurationError(
                expected="one value a setting",
                found=f"{written[name]}={settings[name]} and {given}={value}",
                remedy="Keep one of them." if written[name] == given else f"Both mean {name}: keep one of them.",
            )
        settings[name], written[name] = value, given
    if FORMAT in settings:
        from mbridge_fsdp_ckpt.integrations.bridge.choice import check_format

        check_format(settings[FORMAT])
    return settings


def _owner(config: Any, name: str) -> tuple[Any, str]:
    """The dataclass that has the field of a dotted name, and the field."""
    *sections, field = name.split(".")
    owner = config
    for section in sections:
        owner = getattr(owner, section, None) if section in _fields(owner) else None
    if field in _fields(owner) or _is_alias(owner, field):
        return owner, field
    near = difflib.get_close_matches(name, [*_names(config), *ALIASES], 1, 0.7)
    raise ConfigurationError(
        expected="the dotted name of a setting",
        found=repr(name),
        remedy=f"Did you mean {near[0]!r}?" if near else f"Settings are in {', '.join(_fields(config))}.",
    )


def _fields(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)] if _is_section(owner) else []


def _is_alias(owner: Any, name: str) -> bool:
    """Whether a section has a second name for one of its fields; Bridge 0.5 has `dataset.seq_length` so."""
    found = getattr(type(owner), name, None) if _is_section(owner) else None
    return isinstance(found, property) and found.fset is not None


def _names(owner: Any, prefix: str = "") -> Iterator[str]:
    for name in _fields(owner):
        yield prefix + name
        yield from _names(getattr(owner, name, None), f"{prefix}{name}.")


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fitted(name: str, owner: Any, field: str, value: Any) -> Any:
    present = getattr(owner, field)
    if _is_section(present) and not isinstance(value, str | None):  # mixed_precision is a section, or the name of one
        raise ConfigurationError(
            expected="a setting, not a whole section",
            found=repr(value),
            remedy=f"Name one of its settings: {', '.join(f'{name}.{inner}' for inner in _fields(present)[:5])}, ...",
            key=name,
        )
    return value if name == FORMAT else fitted(name, owner, field, value)

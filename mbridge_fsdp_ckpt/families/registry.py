# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The families of this process: which of them claims a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mbridge_fsdp_ckpt.errors import CheckpointError, FamilyError
from mbridge_fsdp_ckpt.families.declaration import Claim, Family, ParameterContext, Segment
from mbridge_fsdp_ckpt.families.lora import base_of

ENTRY_POINT_GROUP = "mbridge_fsdp_ckpt.families"


class FamilyRegistry:
    """The families of a process, by name, which are all asked about each parameter.

    Args:
        families: The families to begin with.

    Raises:
        FamilyError: Two of different classes have one name.
    """

    def __init__(self, families: Iterable[Family] = ()) -> None:
        self._families: dict[str, Family] = {}
        for family in families:
            self.register(family)

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._families))

    @property
    def families(self) -> tuple[Family, ...]:
        """Registered families."""
        return tuple(self._families.values())

    def family(self, name: str) -> Family:
        """The family of that name.

        Raises:
            FamilyError: There is none.
        """
        if name not in self._families:
            raise FamilyError(
                expected=f"one of the installed families: {', '.join(self.names)}",
                found=repr(name),
                remedy="Install the package that has it.",
            )
        return self._families[name]

    def origin(self, name: str) -> str:
        """The dotted path of a family's class."""
        kind = type(self.family(name))
        return f"{kind.__module__}.{kind.__qualname__}"

    def register(self, family: Family) -> None:
        """Add a family, or replace one of the same class.

        Args:
            family: An object with `name`, `version` and `segments`.

        Raises:
            FamilyError: A family of another class has this name, or the object is no family.
        """
        if not isinstance(family, Family):
            raise FamilyError(
                expected="an object with name, version and segments()",
                found=repr(family),
                remedy="See docs/families.md.",
            )
        taken = self._families.get(family.name)
        if taken is not None and type(taken) is not type(family):
            raise FamilyError(
                expected=f"one family named {family.name!r}",
                found=f"{_origin(taken)} and {_origin(family)}",
                remedy="Uninstall one of the two packages, or rename its family.",
            )
        self._families[family.name] = family

    def unregister(self, name: str) -> None:
        """Remove a family; unknown names are ignored."""
        self._families.pop(name, None)

    def claim(self, parameter: ParameterContext) -> Claim | None:
        """The one family's claim on a parameter, or None where it is not fused.

        The output projection of a low-rank adapter is fused as the layer it adapts (`lora.base_of`).

        Raises:
            FamilyError: Two families claim it, a family raised, its rows don't add up, or the framework marks it as
                fused and none claims it.
        """
        asked = base_of(parameter) or parameter
        claims = [
            Claim(family.name, family.version, segments)
            for family in self._families.values()
            if (segments := _ask(family, asked)) is not None
        ]
        if len(claims) > 1:
            raise FamilyError(
                expected="at most one family for a parameter",
                found=" and ".join(_origin(self._families[c.family]) for c in claims),
                remedy="Unregister one of them.",
                key=parameter.name,
            )
        if claims:
            _check(claims[0], parameter)
        elif parameter.fused:
            raise FamilyError(
                expected="a family that says how this fused parameter splits",
                found=f"{parameter.fused}, shape {parameter.local_shape} (one TP rank); none of "
                f"{', '.join(self.names)} claims it",
                remedy="Add a family (docs/families.md): stored whole, it would load wrongly at another "
                "tensor-parallel size.",
                key=parameter.name,
            )
        return claims[0] if claims else None

    def that_would_claim(self, parameter: ParameterContext) -> str | None:
        """The family whose claim on a parameter would fit it, if there is one; nothing is raised.

        Args:
            parameter: One that need not exist.
        """
        for family in self._families.values():
            try:
                segments = _ask(family, parameter)
                if segments is not None:
                    _check(Claim(family.name, family.version, segments), parameter)
                    return family.name
            except CheckpointError:
                continue
        return None

    def check_installed(self, families: Mapping[str, str]) -> None:
        """Whether the families that split a checkpoint's keys are installed here.

        Args:
            families: `name/version` as recorded, with one key of each.

        Raises:
            FamilyError: One is not, or in another version.
        """
        for recorded, key in families.items():
            name, _, version = recorded.rpartition("/")
            installed = self._families.get(name)
            if installed is not None and str(installed.version) == version:
                continue
            found = "no such family" if installed is None else f"version {installed.version} of {_origin(installed)}"
            raise FamilyError(
                expected=f"family {name!r}, version {version}, which split this key",
                found=f"{found}; installed: {', '.join(self.names)}",
                remedy="Install the package and version that saved the checkpoint, or register_family() that family.",
                key=key,
            )


def _ask(family: Family, parameter: ParameterContext) -> tuple[Segment, ...] | None:
    try:
        answer: Any = family.segments(parameter)
    except CheckpointError:
        raise
    except Exception as error:
        raise FamilyError(
            expected=f"family {_origin(family)} to answer",
            found=f"{type(error).__name__}: {error}",
            remedy="This is a defect of that family.",
            key=parameter.name,
        ) from error
    if answer is None or (isinstance(answer, tuple) and all(_is_segment(segment) for segment in answer)):
        return answer
    raise FamilyError(
        expected=f"family {_origin(family)} to answer a tuple of Segment, or None",
        found=repr(answer)[:200],
        remedy="This is a defect of that family.",
        key=parameter.name,
    )


def _is_segment(value: Any) -> bool:
    return (
        isinstance(value, Segment)
        and type(value.rows) is int
        and all(isinstance(text, str) for text in (value.suffix, value.module))
    )


def _check(claim: Claim, parameter: ParameterContext) -> None:
    rows, shape = sum(segment.rows for segment in claim.segments), parameter.local_shape
    if shape and rows == shape[0] and all(segment.rows > 0 for segment in claim.segments):
        return
    sizes = ", ".join(f"{s.module}{s.suffix}={s.rows}" for s in claim.segments)
    raise FamilyError(
        expected=f"positive rows that add up to the first dimension of shape {shape} (one TP rank)",
        found=f"family {claim.family!r} declares {sizes or 'nothing'}: {rows} rows",
        remedy="Is the model's configuration supported by this family at this tensor-parallel size?",
        key=parameter.name,
    )


def _origin(family: Family) -> str:
    return f"{family.name!r} ({type(family).__module__}.{type(family).__qualname__})"


@cache
def default_registry() -> FamilyRegistry:
    """The registry of this process: built-in families, and those of installed distributions by entry point.

    Raises:
        FamilyError: An entry point gives no family, or two families have one name.
    """
    from mbridge_fsdp_ckpt.families.built_in import FAMILIES

    registry = FamilyRegistry(FAMILIES)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        registry.register(_load(point))
    return registry


def _load(point: EntryPoint) -> Family:
    try:
        family: Family = point.load()()
    except Exception as error:
        raise FamilyError(
            expected=f"entry point {point.name!r} = {point.value!r} to give a family",
            found=f"{type(error).__name__}: {error}",
            remedy=f"Repair or uninstall {point.dist.name if point.dist else 'its distribution'}.",
        ) from error
    return family


def register_family(family: Family) -> None:
    """Add a family to the registry of this process, on every rank, before the first save or load.

    Args:
        family: An object with `name`, `version` and `segments`.

    Raises:
        FamilyError: A family of another class has this name, or the object is no family.
    """
    default_registry().register(family)

"""Families declare, the planner executes.

A fused parameter is several logical tensors (components) stacked along dimension 0.  Tensor parallelism cuts each
component for itself, so that a checkpoint can only be loaded at another tensor-parallel size if the components
stand apart on disk.  A family says which components a parameter holds, in which order and with how many rows:

    SwiGLU linear_fc1.weight on one of two TP ranks        on disk
        rows 0..47    gate   (half of it)                      linear_fc1.weight_w  (96 rows)
        rows 48..95   up     (half of it)                      linear_fc1.weight_v  (96 rows)

A suffix may recur (interleaved layouts): its rows then follow one another in the component.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from mbridge_fsdp_ckpt.errors import CheckpointError, FamilyError

ENTRY_POINT_GROUP = "mbridge_fsdp_ckpt.families"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a fused parameter.

    Args:
        suffix: Appended to the parameter's key on disk; it names the component.
        rows: Rows of dimension 0 on this tensor-parallel rank.
    """

    suffix: str
    rows: int


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """What a family may look at.

    Args:
        name: Dotted parameter name inside the model.
        ancestors: (dotted path, module) from the module that owns the parameter up to the root.
        local_shape: Shape on one tensor-parallel rank, before data-parallel sharding.
    """

    name: str
    ancestors: tuple[tuple[str, Any], ...]
    local_shape: tuple[int, ...]

    @property
    def leaf(self) -> str:
        """The parameter's own name: weight, bias, weight3."""
        return self.name.rpartition(".")[2]

    def ancestor(self, level: int) -> Any | None:
        """The owner (0), its parent (1), ...; None above the root."""
        return self.ancestors[level][1] if level < len(self.ancestors) else None

    def child_name(self, level: int) -> str:
        """The attribute under which `ancestor(level)` hangs in its parent."""
        return self.ancestors[level][0].rpartition(".")[2] if level < len(self.ancestors) else ""


@runtime_checkable
class Family(Protocol):
    """One model family's knowledge of its fused parameters."""

    name: str
    version: int

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """The parameter's segments along dimension 0, in order; None where it is not this family's."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A family's answer for one parameter, checked."""

    family: str
    version: int
    segments: tuple[Segment, ...]


class FamilyRegistry:
    """Families by name; asks them all about each parameter."""

    def __init__(self, families: Iterable[Family] = ()) -> None:
        self._families: dict[str, Family] = {}
        for family in families:
            self.register(family)

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._families))

    def register(self, family: Family) -> None:
        """Add a family.

        Raises:
            FamilyError: Another family has this name, or the object is no family.
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

        Raises:
            FamilyError: Two families claim it, a family raised, or its rows don't add up.
        """
        claims = [
            Claim(family.name, family.version, segments)
            for family in self._families.values()
            if (segments := _ask(family, parameter)) is not None
        ]
        if not claims:
            return None
        if len(claims) > 1:
            raise FamilyError(
                expected="at most one family for a parameter",
                found=" and ".join(_origin(self._families[c.family]) for c in claims),
                remedy="Unregister one of them.",
                key=parameter.name,
            )
        _check(claims[0], parameter)
        return claims[0]


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
    suffix, rows = getattr(value, "suffix", None), getattr(value, "rows", None)
    return isinstance(value, Segment) and type(rows) is int and isinstance(suffix, str)


def _check(claim: Claim, parameter: ParameterContext) -> None:
    rows = sum(segment.rows for segment in claim.segments)
    if not parameter.local_shape or rows != parameter.local_shape[0] or any(s.rows <= 0 for s in claim.segments):
        sizes = ", ".join(f"{s.suffix}={s.rows}" for s in claim.segments)
        raise FamilyError(
            expected=f"positive rows that add up to dimension 0 of shape {parameter.local_shape} (one TP rank)",
            found=f"family {claim.family!r} declares {sizes}: {rows} rows",
            remedy="Is the model's configuration supported by this family at this tensor-parallel size?",
            key=parameter.name,
        )


def _origin(family: Family) -> str:
    return f"{family.name!r} ({type(family).__module__}.{type(family).__qualname__})"


@cache
def default_registry() -> FamilyRegistry:
    """The registry of this process: built-in families and those of installed distributions."""
    from mbridge_fsdp_ckpt.families.gated_delta_net import GatedDeltaNetFamily
    from mbridge_fsdp_ckpt.families.gated_linear_unit import GatedLinearUnitFamily

    registry = FamilyRegistry([GatedLinearUnitFamily(), GatedDeltaNetFamily()])
    for point in entry_points(group=ENTRY_POINT_GROUP):
        registry.register(point.load()())
    return registry


def register_family(family: Family) -> None:
    """Add a family to this process's registry; see `FamilyRegistry.register`."""
    default_registry().register(family)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The registry refuses what contradicts itself, and names who did it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import FamilyError, LayoutError
from mbridge_fsdp_ckpt.families import (
    Claim,
    FamilyRegistry,
    ParameterContext,
    Segment,
    default_registry,
    register_family,
    registry,
)

PARAMETER = ParameterContext("decoder.weight", (("decoder", object()), ("", object())), (6, 2))


class Fixed:
    """A family that always gives the same answer, or raises it."""

    version = 3

    def __init__(self, name: str, answer: Any) -> None:
        self.name, self.answer = name, answer

    def segments(self, parameter: ParameterContext) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Other(Fixed):
    """The same, by another author."""


HALVES = (Segment("_a", 3), Segment("_b", 3))


@pytest.fixture
def fresh_default_registry() -> Iterator[None]:
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


def test_the_only_claim_is_returned_with_the_family_and_its_version() -> None:
    families = FamilyRegistry([Fixed("silent", None), Fixed("loud", HALVES)])
    assert families.claim(PARAMETER) == Claim("loud", 3, HALVES)
    assert families.names == ("loud", "silent")


def test_nobody_claims() -> None:
    assert FamilyRegistry([Fixed("silent", None)]).claim(PARAMETER) is None
    assert FamilyRegistry().claim(PARAMETER) is None


def test_two_types_of_one_name_are_refused_and_named() -> None:
    families = FamilyRegistry([Fixed("twin", None)])
    with pytest.raises(FamilyError, match=r"Fixed.*Other"):
        families.register(Other("twin", HALVES))
    assert families.claim(PARAMETER) is None


def test_the_same_type_may_register_again() -> None:
    families = FamilyRegistry([Fixed("again", None)])
    families.register(Fixed("again", HALVES))
    assert families.claim(PARAMETER) == Claim("again", 3, HALVES)


def test_two_claims_on_one_parameter_name_both_families_and_the_parameter() -> None:
    families = FamilyRegistry([Fixed("one", HALVES), Fixed("two", HALVES)])
    with pytest.raises(FamilyError, match=r"'one'.*'two'") as caught:
        families.claim(PARAMETER)
    assert caught.value.key == "decoder.weight"


def test_a_family_can_be_unregistered() -> None:
    families = FamilyRegistry([Fixed("one", HALVES)])
    families.unregister("one")
    families.unregister("never there")
    assert families.names == ()
    assert families.claim(PARAMETER) is None


def test_a_family_that_raises_is_named_with_the_parameter() -> None:
    with pytest.raises(FamilyError, match=r"'bad'.*ZeroDivisionError: oops") as caught:
        FamilyRegistry([Fixed("bad", ZeroDivisionError("oops"))]).claim(PARAMETER)
    assert caught.value.key == "decoder.weight"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_named_error_of_a_family_passes_unchanged() -> None:
    mine = LayoutError(expected="a", found="b", remedy="c")
    with pytest.raises(LayoutError) as caught:
        FamilyRegistry([Fixed("strict", mine)]).claim(PARAMETER)
    assert caught.value is mine


@pytest.mark.parametrize(
    ("segments", "rows"),
    [
        ((Segment("_a", 3), Segment("_b", 2)), "5 rows"),
        ((Segment("_a", 3), Segment("_b", 4)), "7 rows"),
        ((Segment("_a", 6), Segment("_b", 0)), "6 rows"),
        ((Segment("_a", 7), Segment("_b", -1)), "6 rows"),
        ((), "0 rows"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(segments: tuple[Segment, ...], rows: str) -> None:
    with pytest.raises(FamilyError, match=rows) as caught:
        FamilyRegistry([Fixed("short", segments)]).claim(PARAMETER)
    assert caught.value.key == "decoder.weight"


def test_a_scalar_cannot_be_fused() -> None:
    scalar = ParameterContext("scale", (("", object()),), ())
    with pytest.raises(FamilyError, match=r"shape \(\)"):
        FamilyRegistry([Fixed("short", (Segment("_a", 1),))]).claim(scalar)


@pytest.mark.parametrize("answer", [[("_a", 6)], (("_a", 3), ("_b", 3)), "_a", 6, (Segment("_a", "6"),)])  # type: ignore[arg-type]
def test_an_answer_that_is_no_tuple_of_segments_names_the_family_and_the_parameter(answer: Any) -> None:
    with pytest.raises(FamilyError, match="sloppy") as caught:
        FamilyRegistry([Fixed("sloppy", answer)]).claim(PARAMETER)
    assert caught.value.key == "decoder.weight"


@pytest.mark.parametrize("stranger", [object(), "name", Segment("_a", 1)])
def test_what_is_no_family_is_refused(stranger: Any) -> None:
    with pytest.raises(FamilyError, match="segments"):
        FamilyRegistry().register(stranger)


@pytest.mark.parametrize(
    ("recorded", "found"),
    [("mine/3", None), ("mine/2", "version 3"), ("mine/4", "version 3"), ("other/1", "no such family")],
)
def test_a_checkpoint_needs_the_families_and_versions_that_split_it(recorded: str, found: str | None) -> None:
    families = FamilyRegistry([Fixed("mine", None)])
    if found is None:
        families.check_installed({recorded: "model.weight_a"})
        return
    with pytest.raises(FamilyError, match=found) as caught:
        families.check_installed({recorded: "model.weight_a"})
    assert caught.value.key == "model.weight_a"


@dataclass
class Point:
    """An entry point of an installed distribution."""

    family: Any
    name: str = "point"
    value: str = "package:Family"
    dist: Any = None

    def load(self) -> Any:
        return self.family


class Installed(Fixed):
    def __init__(self) -> None:
        super().__init__("installed", HALVES)


@pytest.mark.usefixtures("fresh_default_registry")
def test_installed_families_join_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def entry_points(*, group: str) -> list[Point]:
        asked.append(group)
        return [Point(Installed)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert default_registry().names == (
        "gated_delta_net",
        "gated_linear_unit",
        "installed",
        "latent_attention",
        "mamba",
    )
    assert asked == ["mbridge_fsdp_ckpt.families"]
    assert default_registry().claim(PARAMETER) == Claim("installed", 3, HALVES)


@pytest.mark.usefixtures("fresh_default_registry")
def test_an_installed_family_with_a_built_in_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(lambda: Fixed("gated_linear_unit", None))])
    with pytest.raises(FamilyError, match=r"GatedLinearUnitFamily.*Fixed"):
        default_registry()


@pytest.mark.usefixtures("fresh_default_registry")
def test_a_family_registered_in_code_counts_in_this_process() -> None:
    register_family(Fixed("mine", HALVES))
    assert default_registry().claim(PARAMETER) == Claim("mine", 3, HALVES)


@pytest.mark.usefixtures("fresh_default_registry")
def test_an_installed_family_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(lambda: 1 / 0)])
    with pytest.raises(FamilyError, match=r"'point' = 'package:Family'.*ZeroDivisionError"):
        default_registry()

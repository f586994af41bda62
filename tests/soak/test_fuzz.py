# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whatever the JSON or the pickle says, the reader works or raises a named error, and allocates little."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.errors import CheckpointError
from tests.soak import attacks_stock, damage, forge, hostile, sampling
from tests.unit import handmade

EXAMPLES = 300
BOUND = 64 << 20  # bytes; the checkpoints have some thousands

fuzzed = hypothesis.settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(st.characters(categories=None), max_size=8),
    st.sampled_from(["../x", "..", "float32", "qint8", "complex64", "$tuple", handmade.payload(0), handmade.WEIGHT]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "$tensor", "$dict", "$tuple", "$float", "$bytes", "$dtype"]), inner),
    ),
    max_leaves=4,
)
mutations = st.lists(
    st.tuples(st.sampled_from(["replace", "delete", "copy"]), st.integers(0, 400), st.integers(0, 400), values),
    min_size=1,
    max_size=3,
)


@pytest.fixture(autouse=True, scope="module")
def repeatable(request: pytest.FixtureRequest) -> None:
    """The seed stands in the output, before anything can fail."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nfuzzing; {sampling.how_to_repeat()}")


@cache
def pristine(stock: bool) -> dict[str, bytes]:
    """The files of a good checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        directory = handmade.make(Path(folder) / "iter_0000010")
        if stock:
            attacks_stock.stock(directory)
        return damage.contents(directory)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    found = []
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        found += [(node, key), *places(node[key])]
    return found


def mutate(document: Any, mutation: tuple[str, int, int, Any]) -> None:
    """Replace a part of a document, delete it, or put a copy of another part there."""
    kind, where, other, value = mutation
    known = places(document)
    if not known:
        return
    holder, key = known[where % len(known)]
    if kind == "delete":
        del holder[key]
    elif kind == "copy":
        source, at = known[other % len(known)]
        holder[key] = json.loads(json.dumps(source[at]))
    else:
        holder[key] = value


def read_bounded(stock: bool, change: Callable[[Path], Any]) -> None:
    """Read a changed checkpoint; only named errors, and little memory."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "iter_0000010"
        directory.mkdir()
        damage.write(directory, dict(pristine(stock)))
        change(directory)
        tracemalloc.start()
        try:
            for read in hostile.readers(directory).values():
                try:
                    read(directory)
                except CheckpointError:
                    hypothesis.event("refused")
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < BOUND, f"{peak} bytes; {sampling.how_to_repeat()}"


def test_what_is_not_changed_is_read() -> None:
    for stock in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            damage.write(Path(folder), dict(pristine(stock)))
            hostile.open_everything(Path(folder))


@hypothesis.seed(sampling.seed())
@fuzzed
@hypothesis.given(mutations)
def test_a_signed_manifest(changes: list[tuple[str, int, int, Any]]) -> None:
    def change(directory: Path) -> None:
        body = forge.read_manifest(directory)
        for mutation in changes:
            mutate(body, mutation)
        forge.sign(directory, body)

    read_bounded(False, change)


@hypothesis.seed(sampling.seed())
@hypothesis.settings(fuzzed, max_examples=EXAMPLES // 3)
@hypothesis.given(mutations)
def test_a_signed_record(changes: list[tuple[str, int, int, Any]]) -> None:
    """What a rank says of itself is something else."""

    def shaken(file: forge.Index) -> None:
        record = json.loads(file["record"])
        for mutation in changes:
            mutate(record, mutation)
        file["record"] = json.dumps(record).encode()

    read_bounded(False, forge.edit_index(shaken, handmade.index(0)))


ARRAYS = ("ranks", "keys", "names", "numbers", "rows")
numbers = st.one_of(st.integers(0, 20), st.integers(0, 1 << 64), st.integers(0, 63).map(lambda bit: 1 << bit))


@pytest.mark.parametrize("name", [handmade.GROUP, handmade.index(0)])
@hypothesis.seed(sampling.seed())
@fuzzed
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(ARRAYS), st.integers(0, 40), st.integers(0, 40), numbers), max_size=3), mutations
)
def test_a_signed_index(
    name: str, changes: list[tuple[str, int, int, int]], of_header: list[tuple[str, int, int, Any]]
) -> None:
    """Numbers of its arrays are others, elements are left out or there twice; or its header says other things."""

    def change(directory: Path) -> None:
        edit = forge.edit_index(lambda file: _shaken(file, changes), name)
        (edit if changes else forge.edit_header(lambda header: _mutated(header, of_header), name))(directory)

    read_bounded(False, change)


def _mutated(header: dict[str, Any], changes: list[tuple[str, int, int, Any]]) -> bytes:
    for mutation in changes:
        mutate(header, mutation)
    return json.dumps(header).encode()


def _shaken(file: forge.Index, changes: list[tuple[str, int, int, int]]) -> None:
    for array, where, other, number in changes:
        elements = file[array]
        if not elements:
            continue
        place = where % len(elements)
        if other % 5 == 0:
            elements.insert(other % len(elements), dict(elements[place]))
        elif other % 5 == 1:
            del elements[place]
        else:
            _put_number(elements, place, other, number)


def _put_number(elements: list[dict[str, Any]], place: int, other: int, number: int) -> None:
    element = dict(elements[place])
    field = sorted(element)[other % len(element)]
    if isinstance(element[field], list):
        element[field] = [number % (1 << 64), *element[field][1:]]
    elif isinstance(element[field], int):
        element[field] = number % (1 << 32)  # a number of any width holds it
    elements[place] = element


@hypothesis.seed(sampling.seed())
@fuzzed
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=4)
)
def test_metadata_of_stock(changes: list[tuple[int, int, bytes]]) -> None:
    def change(directory: Path) -> None:
        data = (directory / ".metadata").read_bytes()
        for where, length, put in changes:
            position = where % (len(data) + 1)
            data = data[:position] + put + data[position + length :]
        (directory / ".metadata").write_bytes(data)

    read_bounded(True, change)

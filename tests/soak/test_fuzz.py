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
    deadline=None,
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
            hostile.open_everything(directory)
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
@fuzzed
@hypothesis.given(mutations)
def test_a_signed_table(changes: list[tuple[str, int, int, Any]]) -> None:
    def change(lines: list[Any]) -> None:
        for mutation in changes:
            mutate(lines, mutation)

    read_bounded(False, forge.edit_table(change))


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

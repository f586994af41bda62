"""`verify`: tables that contradict their keys, each other or the manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.care.audit import Audit
from mbridge_fsdp_ckpt.care.findings import Finding, Tiling
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import handmade
from tests.unit.handmade import BIAS, KEYS, STEP, WEIGHT, table
from tests.unit.test_cli_verify import audited, rewrite


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def _without(key: str) -> Any:
    return lambda header, chunks: (header, [chunk for chunk in chunks if chunk.key != key])


def _twice(key: str) -> Any:
    return lambda header, chunks: (header, chunks + [chunk for chunk in chunks if chunk.key == key])


def _moved(key: str, box: Box) -> Any:
    return lambda header, chunks: (
        header,
        [replace(c, box=box) if c.key == key else c for c in chunks],
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_without(WEIGHT), "6 elements in its chunks"),
        (_twice(WEIGHT), "18 elements in its chunks"),
        (_moved(WEIGHT, Box((0, 0), (2, 3))), "as many, but some twice and some never"),
        (_moved(WEIGHT, Box((1, 0), (2, 3))), "as many, but some twice and some never"),
    ],
)
def test_chunks_that_do_not_tile_their_key_are_found(directory: Path, change: Any, found: str) -> None:
    rewrite(directory, 1, change)
    assert list(Audit(directory).findings()) == [
        Finding("tiling", "manifest.json", "each of 12 elements in one chunk", found, WEIGHT)
    ]


def test_a_key_without_any_chunk_is_found(directory: Path) -> None:
    rewrite(directory, 0, _without(STEP))
    assert audited(directory) == [("tiling", "manifest.json", STEP)]


@pytest.mark.parametrize(
    ("keys", "findings"),
    [
        ({}, [("keys", BIAS, "one table to declare it", "0")]),
        ({BIAS: KEYS[BIAS], WEIGHT: KEYS[WEIGHT]}, [("keys", WEIGHT, "one table to declare it", "2")]),
        (
            {BIAS: KeyEntry(dtype="int32", shape=(3,))},
            [("keys", BIAS, str(KEYS[BIAS]), str(KeyEntry(dtype="int32", shape=(3,))))],
        ),
        (
            {BIAS: KEYS[BIAS], "alien": KEYS[BIAS]},
            [("keys", "alien", "a key that the manifest lists", str(KEYS[BIAS]))],
        ),
    ],
)
def test_keys_that_tables_declare_are_those_of_the_manifest(directory: Path, keys: Any, findings: Any) -> None:
    rewrite(directory, 1, lambda header, chunks: (header.model_copy(update={"keys": keys}), chunks))
    assert [(f.subject, f.key, f.expected, f.found) for f in Audit(directory).findings()] == findings


def test_a_table_of_another_rank_is_found(directory: Path) -> None:
    rewrite(directory, 1, lambda header, chunks: (header.model_copy(update={"rank": 7}), chunks))
    assert list(Audit(directory).findings()) == [Finding("table", table(1), "rank 1", "rank 7")]


def test_a_row_outside_its_key_is_found(directory: Path) -> None:
    rewrite(directory, 1, _moved(WEIGHT, Box((3, 0), (2, 3))))
    assert audited(directory) == [("table", table(1), None)]


@pytest.mark.parametrize(
    ("shape", "boxes", "tiles"),
    [
        ((4, 3), [((0, 0), (4, 3))], True),
        ((4, 3), [((0, 0), (1, 3)), ((1, 0), (3, 1)), ((1, 1), (3, 2))], True),
        ((4, 3), [((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ((), [((), ())], True),
        ((), [], False),
        ((0, 3), [], True),
    ],
)
def test_tiling(shape: tuple[int, ...], boxes: list[Any], tiles: bool) -> None:
    tiling = Tiling({"key": KeyEntry(dtype="float32", shape=shape)})
    for offset, size in boxes:
        tiling.add("key", Box(offset, size))
    assert (list(tiling.findings()) == []) is tiles

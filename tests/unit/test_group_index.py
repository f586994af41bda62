# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Index files of several ranks, as one: against a merge by the rules of docs/format.md; and groups' as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError, PlanDisagreementError, UnsupportedStateError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Columns, box_of
from mbridge_fsdp_ckpt.format.directory import Directory, IndexedKeys
from mbridge_fsdp_ckpt.format.group_index import merged
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex, own_index
from mbridge_fsdp_ckpt.format.rows import Chunk, Row, Scalar
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.format.write_results import (
    MAX_SETS,
    WriteResult,
    count_keys,
    together,
    write_group_index,
    write_own_index,
)
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.ranges import ByteRange, OpenFiles
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import handmade, index_bytes
from tests.unit.handmade import SAVE

FILES = Files(SAVE)
KEYS = {
    f"model.{shape}.{number}": KeyEntry(dtype=dtype, shape=shape)
    for shape in ((), (12,), (12, 3), (12, 2, 5))
    for number, dtype in enumerate(("float32", "bfloat16", "int8"))
} | {f"optimizer.state.{n}.step": KeyEntry(dtype="float32", shape=(), kind="tensor") for n in range(5)}
DESCRIPTIONS = [f"module.{n}" for n in range(6)]


def drawn(random: Random, ranks: int, copies: int = 0) -> tuple[list[RankIndex], list[list[Row]]]:
    """Ranks that hold blocks of all keys, somehow: each block once, each rank in an order of its own.

    Args:
        random: Draws.
        ranks: How many.
        copies: At most so many ranks have a number besides the one whose counts; there are as many param groups.
    """
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    for key, entry in KEYS.items():
        if not entry.is_sharded:
            counts = random.randrange(ranks)
            holders = {counts, *random.choices(range(ranks), k=copies)}
            for rank in holders:
                rows[rank].append(Scalar(key, random.randbytes(4), counts=rank == counts))
            continue
        cuts = sorted({0, 12, *random.choices(range(1, 12), k=random.randrange(6))}) if entry.shape else [0, 1]
        for low, high in pairwise(cuts):
            box = (
                Box((low, *(0 for _ in entry.shape[1:])), (high - low, *entry.shape[1:]))
                if entry.shape
                else Box((), ())
            )
            record = ByteRange(random.randrange(1 << 20), 1 << 12)
            lead, checksum = random.randrange(200), random.getrandbits(64)
            random.choice(rows).append(Chunk(key, box, record, lead, 4 * box.volume, checksum))
    said = []
    for rank in range(ranks):
        random.shuffle(rows[rank])
        has = any(isinstance(row, Chunk) for row in rows[rank])
        payload = FileEntry(name="x", size=1 << 21, checksum=f"xxh3_64:{random.getrandbits(64):016x}") if has else None
        axes = {axis: random.randrange(4) for axis in ("tensor", "data", "expert") if random.random() < 0.7}
        names = [random.sample(DESCRIPTIONS, k=random.randrange(len(DESCRIPTIONS))) for _ in range(3)]
        keys = {row.key: KEYS[row.key] for row in rows[rank]}
        parameters = {name: random.getrandbits(64) for name in names[0]}
        groups = {f"{random.getrandbits(64):016x}": random.getrandbits(64) for _ in range(copies)}
        place = {"rank": rank, **axes}
        said.append(RankIndex(2 * rank, place, payload, keys, parameters, names[1], names[2], param_groups=groups))
    return said, rows


def columns_of(said: Sequence[RankIndex], rows: Sequence[list[Row]]) -> list[Columns]:
    return [own_index(one, some, FILES) for one, some in zip(said, rows, strict=True)]


def counted(part: dict[str, Any]) -> dict[str, Any]:
    """As `decode` gives it, which knows counts and checksums."""
    return index_bytes.decode(index_bytes.encode(part))


@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("seed", range(20))
def test_a_group_is_what_the_format_says(seed: int, copies: int) -> None:
    random = Random(seed)
    parts = columns_of(*drawn(random, random.randrange(1, 6), copies))
    expected = handmade.grouped([index_bytes.decode(part.to_bytes()) for part in parts])
    assert index_bytes.decode(merged(parts).to_bytes()) == counted(expected)


@pytest.mark.parametrize("seed", range(5))
def test_a_group_can_be_opened_and_has_all_rows(seed: int, tmp_path: Path) -> None:
    said, rows = drawn(Random(100 + seed), 4)
    (tmp_path / "x").write_bytes(data := merged(columns_of(said, rows)).to_bytes())
    file = IndexFile(tmp_path / "x", len(data), FILES, OpenFiles())
    assert Directory([file]).entries() == dict(sorted(KEYS.items()))
    found = {
        (file.text_of_key(place), int(file.ranks["rank"][row["rank"]]), box_of(row, len(file.entry(place).shape)))
        for place, some in file.sharded_rows()
        for row in some
    }
    found |= {(file.text_of_key(n), int(file.ranks["rank"][rank]), Box((), ())) for n, rank, _ in file.all_numbers()}
    assert found == {(row.key, 2 * rank, row.box) for rank, some in enumerate(rows) for row in some}


def test_merging_tells_the_same_whatever_order_a_rank_wrote_in() -> None:
    said, rows = drawn(Random(0), 3)
    first = merged(columns_of(said, rows)).to_bytes()
    assert merged(columns_of(said, [some[::-1] for some in rows])).to_bytes() == first
    assert merged(columns_of(said, rows)).to_bytes() == first


def test_one_ranks_own_is_its_group_but_for_the_record() -> None:
    said, rows = drawn(Random(0), 1)
    [part] = columns_of(said, rows)
    assert merged([part]).record == b""
    assert part.record == RankOwn().model_dump_json().encode()
    assert merged([part]).rows.tobytes() == part.rows.tobytes()


def held(rank: int, key: str, entry: KeyEntry, *boxes: Box) -> Columns:
    payload = FileEntry(name="x", size=1 << 20, checksum="xxh3_64:00")
    rows: list[Row] = [Chunk(key, box, ByteRange(0, 1 << 12), 0, 4 * box.volume, 0) for box in boxes]
    return own_index(RankIndex(rank, {"rank": rank}, payload, {key: entry}), rows, FILES)


UPPER, LOWER = Box((0,), (2,)), Box((2,), (2,))
ENTRY = KeyEntry(dtype="float32", shape=(4,))


def test_ranks_that_describe_a_key_differently_are_named() -> None:
    other = ENTRY.model_copy(update={"dtype": "bfloat16"})
    parts = [held(3, "key", ENTRY, UPPER), held(4, "other", ENTRY, UPPER), held(5, "key", other, LOWER)]
    with pytest.raises(
        PlanDisagreementError, match=r"one description of each key.*different descriptions: ranks 3, 5 have the key"
    ) as caught:
        merged(parts)
    assert caught.value.key == "key"


def test_two_that_wrote_the_first_element_are_named() -> None:
    parts = [held(1, "a", ENTRY, UPPER), held(2, "key", ENTRY, UPPER, LOWER), held(4, "key", ENTRY, UPPER)]
    with pytest.raises(
        PlanDisagreementError, match=r"one rank to write the first element.*several writers: ranks 2, 4"
    ) as caught:
        merged(parts)
    assert caught.value.key == "key"


def test_keys_of_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbridge_fsdp_ckpt.format.own_index.key_hash", lambda text: 5)
    with pytest.raises(PlanDisagreementError, match="keys of different hashes"):
        merged([held(0, "a", ENTRY, UPPER), held(1, "b", ENTRY, UPPER)])


# Groups as a whole.


def written(directory: Path, *groups: list[Columns]) -> Directory:
    files = []
    for number, group in enumerate(groups):
        path = directory / f"group_{number}"
        path.write_bytes(data := merged(group).to_bytes())
        files.append(IndexFile(path, len(data), FILES, OpenFiles()))
    return Directory(files)


def test_a_key_is_found_in_every_group_that_has_rows_of_it(tmp_path: Path) -> None:
    index = written(
        tmp_path,
        [held(0, "a", ENTRY, UPPER), held(1, "b", ENTRY, UPPER, LOWER)],
        [held(2, "a", ENTRY, LOWER)],
    )
    assert [group.path.name for group, _ in index.places("a")] == ["group_0", "group_1"]
    assert [group.path.name for group, _ in index.places("b")] == ["group_0"]
    assert index.places("c") == []
    assert index.places("\ud800") == []
    assert index.entries() == {"a": ENTRY, "b": ENTRY}
    assert (index.count, index.without_one_origin()) == (2, [])
    found = [(group.path.name, sorted(places.values())) for group, places in index.by_group(["b", "a", "c"])]
    assert found == [("group_0", ["a", "b"]), ("group_1", ["a"])]


def test_groups_that_describe_a_key_differently_are_named(tmp_path: Path) -> None:
    other = ENTRY.model_copy(update={"family": "x/1"})
    index = written(tmp_path, [held(0, "a", ENTRY, UPPER)], [held(1, "a", other, LOWER)])
    for ask in (lambda: index.places("a"), index.entries):
        with pytest.raises(ManifestError, match="a as ") as caught:
            ask()
        assert caught.value.key == str(tmp_path / "group_1")


def test_first_elements_are_counted_over_all_groups(tmp_path: Path) -> None:
    index = written(
        tmp_path,
        [held(0, "twice", ENTRY, UPPER), held(1, "never", ENTRY, LOWER)],
        [held(2, "twice", ENTRY, UPPER), held(3, "once", ENTRY, UPPER, LOWER)],
    )
    assert sorted(index.without_one_origin()) == [("never", 0), ("twice", 2)]
    assert index.count == 3


def test_no_group_has_no_keys() -> None:
    index = Directory([])
    assert (index.count, index.entries(), index.places("a"), list(index.by_group(["a"]))) == (0, {}, [], [])
    assert index.without_one_origin() == []
    assert list(index.names(columns.STATE, "a")) == []


def test_a_mapping_of_keys_reads_them_all_only_where_it_must() -> None:
    asked: list[str] = []

    def lookup(key: str) -> KeyEntry | None:
        asked.append(key)
        return {"a": ENTRY, "b": ENTRY}.get(key)

    def read() -> dict[str, KeyEntry]:
        asked.append("all")
        return {"a": ENTRY, "b": ENTRY}

    keys = IndexedKeys(lookup, read, 2)
    assert (len(keys), keys["a"], "c" in keys, keys.get("a")) == (2, ENTRY, False, ENTRY)
    with pytest.raises(KeyError):
        keys["c"]
    assert asked == ["a", "c"]
    assert list(keys) == list(keys) == ["a", "b"]
    assert (keys["b"], "c" in keys, keys == {"a": ENTRY, "b": ENTRY}) == (ENTRY, False, True)
    assert asked == ["a", "c", "all"]


# What groups tell.


def tell(directory: Path, said: Sequence[RankIndex], rows: Sequence[list[Row]]) -> list[WriteResult]:
    for one in said:
        if one.payload:
            with (directory / FILES.payload(one.rank)).open("wb") as file:
                file.truncate(one.payload.size)
    return [
        write_own_index(directory, FILES, one, some, {n: {"lr": n}})
        for n, (one, some) in enumerate(zip(said, rows, strict=True))
    ]


@pytest.mark.parametrize("groups", [[4], [1, 3], [1, 1, 1, 1], [2, 2]])
def test_groups_tell_the_same_however_ranks_are_grouped(tmp_path: Path, groups: list[int]) -> None:
    said, rows = drawn(Random(1), 4)
    told, total = tell(tmp_path, said, rows), list[WriteResult]()
    for size in groups:
        leader = said[len(said) - len(told)].rank
        total.append(write_group_index(tmp_path, FILES, leader, json.loads(json.dumps(together(told[:size])))))
        told = told[size:]
    found = together(total)
    assert count_keys(tmp_path, FILES, found) == len(KEYS)
    assert found["pending"] == []
    assert [entry["rank"] for entry in found["index"]] == [said[sum(groups[:n])].rank for n in range(len(groups))]
    names = [entry["name"] for entry in found["index"]]
    assert names == [FILES.of_group(said[sum(groups[:n])].rank) for n in range(len(groups))]
    assert found["chunks"] == sum(map(len, rows))
    assert found["states"] == sum(len(one.states) for one in said)
    assert found["slots"] == ["step"]
    assert found["hyperparameters"] == {f"{n:016x}": {"lr": n} for n in range(4)}


def test_families_are_told_with_the_first_of_their_keys(tmp_path: Path) -> None:
    entry = ENTRY.model_copy(update={"family": "x/1", "component": "w"})
    said = [RankIndex(r, {"rank": r}, None, {f"model.{1 - r}": entry, "model.plain": ENTRY}) for r in (0, 1)]
    assert together(tell(tmp_path, said, [[], []]))["families"] == {"x/1": "model.0"}


def test_too_many_sets_of_hyperparameters_are_refused() -> None:
    one = together([])
    sets: Any = {f"{n:016x}": {} for n in range(MAX_SETS)}
    assert together([one | {"hyperparameters": sets}])["hyperparameters"] == sets
    with pytest.raises(UnsupportedStateError, match=f"at most {MAX_SETS} different sets"):
        together([one | {"hyperparameters": sets}, one | {"hyperparameters": {"f" * 16: {}}}])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
@pytest.mark.parametrize("name", ["__2_0.distcp", "rank_00002.index"])
def test_a_leader_names_what_a_rank_did_not_write(tmp_path: Path, name: str, damage: Any) -> None:
    told = together(tell(tmp_path, *drawn(Random(2), 2)))
    damage(tmp_path / name)
    with pytest.raises(DamagedCheckpointError) as caught:
        write_group_index(tmp_path, FILES, 0, told)
    assert caught.value.key == str(tmp_path / name)
    assert not (tmp_path / "group_00000.index").exists()


def test_a_key_whose_first_element_two_groups_wrote_is_named(tmp_path: Path) -> None:
    payload = FileEntry(name="x", size=1 << 12, checksum="xxh3_64:00")
    said = [RankIndex(r, {"rank": r}, payload, {"key": ENTRY}) for r in (0, 1)]
    rows: list[list[Row]] = [[Chunk("key", UPPER, ByteRange(0, 1 << 12), 0, 4 * UPPER.volume, 0)] for _ in said]
    told = [write_group_index(tmp_path, FILES, n, one) for n, one in enumerate(tell(tmp_path, said, rows))]
    with pytest.raises(
        PlanDisagreementError, match=r"one rank to write the first element.*2 ranks that wrote it"
    ) as caught:
        count_keys(tmp_path, FILES, together(told))
    assert caught.value.key == "key"

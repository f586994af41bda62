# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Index files against an independent reading of their bytes: what is written, and each rule that refuses another.

handmade / index_bytes  ->  IndexFile     what another writer makes is read, and what breaks a rule is named
own_index, Columns      ->  index_bytes   what is written is what docs/format.md says
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import box_of
from mbridge_fsdp_ckpt.format.directory import Directory
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex, own_index
from mbridge_fsdp_ckpt.format.rows import Chunk, Row, Scalar
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.ranges import ByteRange, OpenFiles
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from tests.unit import handmade, index_bytes
from tests.unit.handmade import AVERAGE, BIAS, KEYS, NAME, SAVE, SET, STEP, WEIGHT, Change, Part

FILES = Files(SAVE)


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """The index of a group of two ranks, taken apart."""
    directory = handmade.make(tmp_path / "iter_0000010")
    return index_bytes.decode((directory / handmade.GROUP).read_bytes())


@pytest.fixture
def own(tmp_path: Path) -> Part:
    """Rank 0's own."""
    directory = handmade.make(tmp_path / "iter_0000011")
    return index_bytes.decode((directory / handmade.index(0)).read_bytes())


Opened = Callable[..., IndexFile]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def read(data: bytes, files: Files = FILES) -> IndexFile:
        path = tmp_path / "x.index"
        path.write_bytes(data)
        return IndexFile(path, len(data), files, OpenFiles())

    return read


def test_what_another_writer_makes_is_read(part: Part, opened: Opened) -> None:
    file = opened(index_bytes.encode(part))
    assert {file.text_of_key(place): file.entry(place) for place in range(4)} == KEYS
    assert [file.coordinates_of(number) for number in (0, 1)] == [
        {"rank": 0, "pipeline": 0, "tensor": 0},
        {"rank": 1, "pipeline": 0, "tensor": 1},
    ]
    boxes = {file.text_of_key(place): [box_of(row, 2) for row in rows] for place, rows in file.sharded_rows()}
    assert boxes[WEIGHT] == boxes[AVERAGE] == [handmade.UPPER, handmade.LOWER]
    place = file.find(STEP)
    assert place is not None
    assert file.number(place) == struct.pack("<f", 7.0)
    assert list(file.all_numbers()) == [(place, 0, struct.pack("<f", 7.0))]
    [named] = file.find_names(columns.PARAMETER, NAME)
    assert int(file.names["value"][named]) == SET
    assert file.record() == RankOwn()


def test_rank_and_record_of_a_ranks_own(own: Part, opened: Opened) -> None:
    file = opened(index_bytes.encode(own))
    assert file.ranks["rank"].tolist() == [0]
    assert "rng_state" in file.record().values
    assert sorted(file.text_of_key(place) for place in range(len(file.keys))) == sorted([WEIGHT, AVERAGE, STEP])


def test_what_is_not_there_is_not_found(part: Part, opened: Opened) -> None:
    file = opened(index_bytes.encode(part))
    for key in ("", "model.weigh", "model.weight2", "model.\ud800", "z" * 10_000):
        assert file.find(key) is None
        for kind in range(5):
            assert not file.find_names(kind, key)
    assert not file.find_names(columns.STATELESS, NAME)


def test_a_text_that_has_anothers_hash_is_not_taken_for_it(part: Part, opened: Opened) -> None:
    """Nobody finds such a pair soon: the file lies about the hash."""
    key = handmade.key_of(part, WEIGHT)
    part["texts"] = part["texts"].replace(WEIGHT.encode(), b"model.WEIGHT")
    assert key["hash"] == index_bytes.hashed(WEIGHT.encode())
    file = opened(index_bytes.encode(part))
    assert file.find(WEIGHT) is None
    assert Directory([file]).places(WEIGHT) == []
    named = next(name for name in part["names"] if name["hash"] == index_bytes.hashed(NAME.encode()))
    part["texts"] = part["texts"].replace(NAME.encode(), NAME.upper().encode())
    assert not opened(index_bytes.encode(part)).find_names(named["kind"], NAME)


@pytest.mark.parametrize("more", [0, 1, 7, 8])
def test_arrays_may_lie_at_any_address(part: Part, opened: Opened, more: int) -> None:
    """A header may have any length: only ours is a multiple of eight."""
    data = index_bytes.encode(part)
    prefix = json.dumps(index_bytes.header_of(data)).encode()
    file = opened(index_bytes.with_header(data, prefix + b" " * (-len(prefix) % 8 + more)))
    assert len(list(file.sharded_rows())) == 3
    assert file.find(BIAS) is not None


def read_whole(opened: Opened, data: bytes) -> None:
    file = opened(data)
    list(file.sharded_rows())
    file.record()


def test_every_flipped_byte_is_seen(own: Part, opened: Opened) -> None:
    data = index_bytes.encode(own)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        with pytest.raises(ManifestError):
            read_whole(opened, bytes(flipped))


def test_every_other_length_is_seen(own: Part, opened: Opened) -> None:
    data = index_bytes.encode(own)
    for size in (*range(0, 40), *range(40, len(data), 97), len(data) - 1):
        with pytest.raises(ManifestError):
            opened(data[:size])
    with pytest.raises(ManifestError, match="arrays as long as the header says"):
        opened(data + b"\0")


def test_a_file_that_shrinks_after_its_size_was_looked_at_is_named(own: Part, tmp_path: Path) -> None:
    data = index_bytes.encode(own)
    path = tmp_path / "x.index"
    path.write_bytes(data[:50])
    with pytest.raises(DamagedCheckpointError) as caught:
        IndexFile(path, len(data), FILES, OpenFiles())
    assert caught.value.key == str(path)


@pytest.mark.parametrize("files", [Files("ba9876543210"), Files(SAVE, f"-{SAVE}")])
def test_an_index_of_another_save_is_refused(part: Part, opened: Opened, files: Files) -> None:
    with pytest.raises(ManifestError, match=f"the index of save {files.save}"):
        opened(index_bytes.encode(part), files)


HUGE = 2**64 - 1


def put(name: str, place: int, field: str, value: Any) -> Change:
    return lambda part: part[name][place].update({field: value})


def header(field: str, value: Any) -> Change:
    return lambda part: part["header"].update({field: value})


def swapped(name: str) -> Change:
    def change(part: Part) -> None:
        part[name][0], part[name][1] = part[name][1], part[name][0]

    return change


def of_key(key: str, **fields: Any) -> Change:
    return lambda part: handmade.key_of(part, key).update(fields)


def no_ranks(part: Part) -> None:
    part |= {"ranks": [], "coordinates": []}


def emptied(part: Part) -> None:
    part |= {name: [] for name in ("ranks", "coordinates", "keys", "names", "numbers", "rows")} | {"texts": b""}


def without(name: str) -> Change:
    return lambda part: part[name].pop()


def again(name: str) -> Change:
    return lambda part: part[name].append(part[name][-1])


def entry(key: str, **fields: Any) -> Change:
    return lambda part: part["header"]["entries"][list(KEYS).index(key)].update(fields)


def nul_key(part: Part) -> None:
    """The first key has no text, the second has both."""
    part["keys"][0]["text"] = 0


def sharded(part: Part) -> list[Part]:
    """The keys that have rows, in order."""
    step = list(KEYS).index(STEP)
    return [key for key in part["keys"] if key["entry"] != step]


def no_rows_in_order(part: Part) -> None:
    """One key has the next one's rows, too."""
    one, other, _ = sharded(part)
    one["count"] += other["count"]
    other.update(first=one["first"] + one["count"], count=0, origins=0)


def rows_round_the_corner(part: Part) -> None:
    """One key has a row too many, the next one less than none: 2^64 - 1, and all of them sum up."""
    one, other, _ = sharded(part)
    one["count"] += other["count"] + 1
    other.update(first=one["count"], count=HUGE)


def a_number_more(part: Part) -> None:
    handmade.key_of(part, STEP)["count"] = 2
    part["numbers"].append(part["numbers"][0])


DEFECTS: list[tuple[str, Change, str]] = [
    ("no rank", no_ranks, "each rank once, in order"),
    ("nothing at all", emptied, "each rank once, in order"),
    ("a rank twice", put("ranks", 1, "rank", 0), "each rank once, in order"),
    ("ranks out of order", swapped("ranks"), "each rank once, in order"),
    ("a payload of more bytes than can be counted", put("ranks", 1, "size", 2**63), "payload of a possible size"),
    ("a payload of as many as a number holds", put("ranks", 0, "size", HUGE), "payload of a possible size"),
    ("a key without text", nul_key, "texts in order"),
    ("texts out of order", put("keys", 1, "text", 1), "texts in order"),
    ("a name without text", lambda part: part["names"][0].update(text=part["keys"][-1]["text"]), "texts in order"),
    ("a text beyond the last byte", put("names", -1, "text", HUGE), "texts to the last byte"),
    ("bytes after the last text", lambda part: part.update(texts=part["texts"] + b"x"), "texts to the last byte"),
    ("a name of another kind", put("names", -1, "kind", 4), "names of known kinds"),
    ("a name of no rank", put("names", 0, "rank", 2), "of ranks of the file"),
    ("names by hash alone", put("names", 0, "kind", 2), "names by kind and hash"),
    ("names of one kind out of order", put("names", 1, "hash", HUGE), "names by kind and hash"),
    ("keys out of order", put("keys", 0, "hash", HUGE), "keys in the order of their hashes"),
    ("a key twice", lambda part: part["keys"][1].update(hash=part["keys"][0]["hash"]), "keys in the order"),
    ("a key without description", of_key(WEIGHT, entry=4), "a description of every key"),
    ("no descriptions", header("entries", []), "a description of every key"),
    ("a tensor of more dimensions", entry(BIAS, shape=[3, 1, 1]), "tensors of at most 2 dimensions"),
    ("a number with dimensions", entry(STEP, shape=[1]), "numbers of none"),
    ("rows that overlap", lambda part: of_last(part).update(first=of_last(part)["first"] - 1), "rows and numbers"),
    ("a key without rows", of_key(BIAS, count=0), "rows and numbers of each key in order"),
    ("a key without rows, all in order", no_rows_in_order, "rows and numbers of each key in order"),
    ("more rows than there are, and fewer than none", rows_round_the_corner, "rows and numbers of each key in order"),
    ("more rows than there are", of_key(BIAS, count=6), "rows and numbers of each key in order"),
    ("rows that sum up to all by overflow", of_key(BIAS, count=HUGE), "rows and numbers of each key in order"),
    ("fewer rows than there are", again("rows"), "rows and numbers of each key in order, and all of them"),
    ("a number that no key has", again("numbers"), "rows and numbers of each key in order, and all of them"),
    ("no number", without("numbers"), "rows and numbers of each key in order, and all of them"),
    ("two numbers", a_number_more, "one number of a key that has one"),
    ("more first elements than rows", of_key(BIAS, origins=2), "no more first elements than rows"),
    ("a number that is too short", put("numbers", 0, "bytes", 3), "numbers as long as their dtype"),
    ("a number that is too long", put("numbers", 0, "bytes", 17), "numbers as long as their dtype"),
    ("a number of no rank", put("numbers", 0, "rank", 2), "numbers as long as their dtype, of ranks of the file"),
    ("a save that is no token", header("save", "x"), "save"),
    ("a suffix that is none", header("suffix", "/../x"), "suffix"),
    ("a dimension that is a text", header("axes", [1]), "axes"),
    ("a dtype that torch has not", entry(BIAS, dtype="float33"), "dtype"),
    ("a shape that is none", entry(BIAS, shape=[-1]), "shape"),
]


def of_last(part: Part) -> Part:
    """The sharded key whose rows come last."""
    return sharded(part)[-1]


@pytest.mark.parametrize(("change", "expected"), [pytest.param(c, e, id=i) for i, c, e in DEFECTS])
def test_a_directory_that_breaks_a_rule_is_refused(part: Part, opened: Opened, change: Change, expected: str) -> None:
    change(part)
    with pytest.raises(ManifestError) as caught:
        opened(index_bytes.encode(part))
    assert expected in caught.value.expected + caught.value.found
    assert caught.value.key is not None
    assert caught.value.key.endswith("x.index")


@pytest.mark.parametrize("dimensions", [0, -1, 65, 2**63, "2", True, None, 1.0])
def test_dimensions_that_are_none_are_refused(part: Part, opened: Opened, dimensions: Any) -> None:
    with pytest.raises(ManifestError, match="dimensions: "):
        opened(index_bytes.encode(part, dimensions=dimensions))


COUNTS = ("ranks", "keys", "names", "numbers", "rows", "texts", "record")


@pytest.mark.parametrize("value", [-1, 0, 1, 7, 2**40, 2**63 - 1, 2**63, 2**64, "1", None, 1.0, True])
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_of_the_header_that_is_not_that_of_the_file_is_refused(
    own: Part, opened: Opened, field: str, value: Any
) -> None:
    if type(value) is int and value == len(own[field]):
        value += 1
    with pytest.raises(ManifestError):
        opened(index_bytes.encode(own, **{field: value}))


@pytest.mark.parametrize("field", [*COUNTS, "save", "suffix", "axes", "entries", "dimensions", "record_checksum"])
def test_a_field_that_the_header_lacks_is_named(own: Part, opened: Opened, field: str) -> None:
    def without_it(prefix: dict[str, Any]) -> Any:
        prefix.pop(field)

    with pytest.raises(ManifestError, match=f"{field}: Field required"):
        opened(with_header(index_bytes.encode(own), without_it))


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    prefix = index_bytes.header_of(data)
    change(prefix)
    return index_bytes.with_header(data, json.dumps(prefix).encode())


def test_unknown_fields_of_a_newer_minor_version_are_passed_over(own: Part, opened: Opened) -> None:
    file = opened(with_header(index_bytes.encode(own), lambda prefix: prefix.update(future=[1])))
    assert file.find(WEIGHT) is not None


@pytest.mark.parametrize(
    "prefix", [b"", b"null", b"[]", b"{", b"{}", b"\xff", b'{"save": 1, "save": 2}', b"[" * 99_999]
)
def test_a_header_that_is_none_is_refused(own: Part, opened: Opened, prefix: bytes) -> None:
    with pytest.raises(ManifestError):
        opened(index_bytes.with_header(index_bytes.encode(own), prefix))


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("length", [2**20, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_is_refused_unread(own: Part, opened: Opened, at: int, length: int) -> None:
    data = bytearray(index_bytes.encode(own))
    struct.pack_into("<Q", data, at, length)
    with pytest.raises(ManifestError, match="whose header and directory lie inside it"):
        opened(bytes(data))


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xc3"])
def test_a_text_that_is_not_utf_8_is_refused(part: Part, opened: Opened, text: bytes) -> None:
    """A surrogate among them: what no other program would take for a text."""
    for name in (WEIGHT, NAME):
        place = part["texts"].index(name.encode())
        broken = part | {
            "texts": part["texts"][:place] + text.ljust(len(name), b"x") + part["texts"][place + len(name) :]
        }
        file = opened(index_bytes.encode(broken))
        with pytest.raises(ManifestError, match="keys and names in UTF-8"):
            [file.text_of_key(n) for n in range(len(file.keys))] + [
                file.text_of_name(n) for n in range(len(file.names))
            ]


ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("a box beyond the last row", {"start": [3, 0]}, r"boxes inside shape \(4, 3\)"),
    ("a box beyond the last column", {"start": [2, 1]}, r"boxes inside shape \(4, 3\)"),
    ("a box that begins beyond", {"start": [5, 0], "extent": [0, 3]}, r"boxes inside shape \(4, 3\)"),
    ("a box that ends beyond by overflow", {"start": [2, 0], "extent": [HUGE, 3]}, r"boxes inside shape \(4, 3\)"),
    ("a box that begins far beyond", {"start": [HUGE, 0]}, r"boxes inside shape \(4, 3\)"),
    ("no rank's", {"rank": 2}, "rows of the file's ranks"),
    ("no rank's at all", {"rank": 2**32 - 1}, "rows of the file's ranks"),
    ("a record that is longer than its file", {"length": 1 << 40}, "records inside their payload files"),
    ("a record that begins beyond its file", {"offset": 1 << 40}, "records inside their payload files"),
    ("a record that ends beyond by overflow", {"offset": HUGE, "length": 64}, "records inside their payload files"),
    ("elements beyond their record", {"lead": 1 << 20}, "elements of bfloat16 inside their records"),
    ("a record without elements", {"length": 0, "lead": 0}, "elements of bfloat16 inside their records"),
    ("a first element more", {"start": [0, 0]}, "1 rows with the first element"),
]


@pytest.mark.parametrize(("fields", "expected"), [pytest.param(f, e, id=i) for i, f, e in ROWS])
def test_a_row_that_breaks_a_rule_is_refused(part: Part, opened: Opened, fields: dict[str, Any], expected: str) -> None:
    handmade.rows_of(part, WEIGHT)[1].update(fields)
    file = opened(index_bytes.encode(part))
    place = file.find(WEIGHT)
    assert place is not None
    with pytest.raises(ManifestError, match=f"{WEIGHT}: {expected}") as caught:
        list(file.rows([place]))
    assert caught.value.key == str(file.path)
    other = file.find(AVERAGE)
    assert other is not None
    assert len(list(file.rows([other]))) == 1, "another key's rows are its own"


def test_no_first_element_is_as_wrong_as_two(part: Part, opened: Opened) -> None:
    handmade.key_of(part, WEIGHT)["origins"] = 0
    with pytest.raises(ManifestError, match="0 rows with the first element"):
        list(opened(index_bytes.encode(part)).sharded_rows())


def test_dimensions_that_a_key_has_not_are_zero(part: Part, opened: Opened) -> None:
    [row] = handmade.rows_of(part, BIAS)
    assert (row["start"], row["extent"]) == ([0, 0], [3, 0])
    row["extent"] = [3, 1]
    with pytest.raises(ManifestError, match=r"boxes inside shape \(3,\)"):
        list(opened(index_bytes.encode(part)).sharded_rows())


def test_as_many_elements_as_overflow_are_not_few(part: Part, opened: Opened) -> None:
    """2^32 x 2^32 elements are none in 64 bits."""
    part["header"]["entries"][list(KEYS).index(BIAS)]["shape"] = [1 << 33, 1 << 33]
    handmade.rows_of(part, BIAS)[0].update(start=[0, 0], extent=[1 << 32, 1 << 32])
    with pytest.raises(ManifestError, match="elements of int64 inside their records"):
        list(opened(index_bytes.encode(part)).sharded_rows())


def test_a_chunk_may_fill_its_record_and_its_file_and_an_empty_one_fits(part: Part, opened: Opened) -> None:
    upper, lower = handmade.rows_of(part, WEIGHT)
    size = part["ranks"][0]["size"]
    upper.update(offset=size - 12, length=12, lead=0)
    lower.update(start=[4, 0], extent=[0, 3], offset=0, length=0, lead=0)
    file = opened(index_bytes.encode(part))
    boxes = {file.text_of_key(place): [box_of(row, 2) for row in rows] for place, rows in file.sharded_rows()}
    assert boxes[WEIGHT] == [handmade.UPPER, Box((4, 0), (0, 3))]


@pytest.mark.parametrize("forced", [{"record_checksum": "0" * 16}])
def test_a_record_that_its_checksum_does_not_cover_is_refused(own: Part, opened: Opened, forced: Any) -> None:
    with pytest.raises(ManifestError, match="the record that its checksum covers"):
        opened(index_bytes.encode(own, **forced)).record()


@pytest.mark.parametrize("record", [b"[]", b"{", b"\xff", b"null", b'{"values": 1, "values": 2}'])
def test_a_record_that_is_none_is_refused(own: Part, opened: Opened, record: bytes) -> None:
    with pytest.raises(ManifestError):
        opened(index_bytes.encode(own | {"record": record})).record()


# What this package writes.


def chunk(key: str, box: Box, at: int = 0) -> Chunk:
    return Chunk(key, box, ByteRange(at, 4096), 64, 4 * box.volume, (at * 0x9E3779B97F4A7C15) % 2**64)


def many(count: int, rank: int = 0, ranks: int = 1) -> tuple[RankIndex, list[Row]]:
    """One rank's part of so many keys of one to three dimensions, each of them cut into three or four rows a rank."""
    keys, rows = {}, list[Row]()
    for number in range(count):
        key, dimensions = f"model.layers.{number}.weight", number % 3 + 1
        pieces = 3 + number % 2
        shape = (pieces * ranks, 2, 5)[:dimensions]
        keys[key] = KeyEntry(dtype="float32", shape=shape)
        for piece in range(pieces):
            box = Box((rank * pieces + piece, 0, 0)[:dimensions], (1, 2, 5)[:dimensions])
            rows.append(chunk(key, box, at=4096 * len(rows)))
    payload = FileEntry(name=f"__{rank}_0.distcp", size=4096 * len(rows), checksum="xxh3_64:00000000000000ff")
    return RankIndex(rank, {"rank": rank}, payload, keys), rows


def test_what_is_written_is_what_the_format_says() -> None:
    payload = FileEntry(name="__7_0.distcp", size=9000, checksum="xxh3_64:0123456789abcdef")
    keys = {"model.ü": KeyEntry(dtype="float32", shape=(2, 3)), STEP: KEYS[STEP]}
    said = RankIndex(
        7,
        {"rank": 7, "tensor": 3},
        payload,
        keys,
        {"b": 5, "a": 2**64 - 1},
        ["frozen"],
        ["fc1"],
        RankOwn(values={"x": 1}),
    )
    rows: list[Row] = [
        chunk("model.ü", Box((1, 0), (1, 3)), 4096),
        Scalar(STEP, struct.pack("<f", 7.0)),
        chunk("model.ü", Box((0, 0), (1, 3))),
    ]
    found = index_bytes.decode(own_index(said, rows, Files(SAVE, f"-{SAVE}")).to_bytes())
    assert (found["header"]["save"], found["header"]["suffix"]) == (SAVE, f"-{SAVE}")
    assert (found["header"]["axes"], found["coordinates"]) == (["rank", "tensor"], [[7, 3]])
    assert found["ranks"] == [{"rank": 7, "size": 9000, "checksum": 0x0123456789ABCDEF}]
    texts = handmade.texts_of(found)
    assert set(texts[:2]) == {"model.ü".encode(), STEP.encode()}
    assert [key["hash"] for key in found["keys"]] == [index_bytes.hashed(text) for text in texts[:2]]
    assert [key["hash"] for key in found["keys"]] == sorted(key["hash"] for key in found["keys"])
    sharded = found["keys"][texts.index("model.ü".encode())]
    assert (sharded["first"], sharded["count"], sharded["origins"]) == (0, 2, 1)
    assert found["header"]["entries"][sharded["entry"]]["shape"] == [2, 3]
    assert [(row["start"], row["extent"], row["offset"]) for row in found["rows"]] == [
        ([0, 0], [1, 3], 0),
        ([1, 0], [1, 3], 4096),
    ]
    assert {(row["rank"], row["lead"], row["length"]) for row in found["rows"]} == {(0, 64, 4096)}
    assert found["rows"][1]["checksum"] == chunk("", Box((), ()), 4096).checksum
    assert found["numbers"] == [{"rank": 0, "bytes": 4, "data": struct.pack("<f", 7.0).ljust(16, b"\0")}]
    named = [(name["kind"], text.decode(), name["value"]) for name, text in zip(found["names"], texts[2:], strict=True)]
    assert sorted(named) == [(0, "a", 2**64 - 1), (0, "b", 5), (1, "frozen", 0), (2, "fc1", 0)]
    assert [(n["kind"], n["hash"]) for n in found["names"]] == sorted((n["kind"], n["hash"]) for n in found["names"])
    assert json.loads(found["record"]) == {"values": {"x": 1}, "extra_state": None}
    assert len(found["texts"]) == sum(map(len, texts))


def test_a_rank_that_wrote_nothing_has_an_index(opened: Opened) -> None:
    said = RankIndex(3, {"rank": 3}, None, {})
    data = own_index(said, [], FILES).to_bytes()
    assert index_bytes.decode(data)["ranks"] == [{"rank": 3, "size": 0, "checksum": 0}]
    file = opened(data)
    assert (list(file.sharded_rows()), file.find("x")) == ([], None)


@pytest.mark.parametrize("count", [1, 17, 18, 19, 20, 400])
def test_rows_are_read_key_by_key_from_blocks(opened: Opened, count: int) -> None:
    """Of three or four rows a key: they begin and end anywhere in blocks of 64, or at their borders."""
    said, rows = many(count)
    file = opened(own_index(said, rows, FILES).to_bytes())
    assert file.header.rows == len(rows)
    by_key = {key: [r for r in rows if r.key == key] for key in said.keys}
    for places in ([], list(range(count)), list(range(0, count, 5)), [0, count - 1] if count > 1 else [0]):
        found = {file.text_of_key(place): some for place, some in file.rows(places)}
        assert list(found) == [file.text_of_key(place) for place in places]
        for key, some in found.items():
            assert [chunk for _, chunk in columns.chunks_of(key, some, said.keys[key])] == by_key[key]


def test_only_the_blocks_of_the_keys_are_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    said, rows = many(400)
    file = opened(own_index(said, rows, FILES).to_bytes())
    width = columns.BLOCK_ROWS * columns.row_dtype(3).itemsize
    read: list[int] = []
    original = OpenFiles.read

    def noted(self: OpenFiles, path: Any, offset: int, length: int, *rest: Any) -> Any:
        read.append(length)
        return original(self, path, offset, length, *rest)

    monkeypatch.setattr(OpenFiles, "read", noted)
    list(file.rows([0]))
    list(file.rows([0, 1, 399]))
    assert len(read) == 3
    assert max(read) <= 2 * width


def test_a_damaged_block_is_that_of_its_keys_alone(opened: Opened) -> None:
    said, rows = many(400)
    data = bytearray(own_index(said, rows, FILES).to_bytes())
    data[-len(index_bytes.decode(bytes(data))["record"]) - 1] ^= 1
    file = opened(bytes(data))
    assert len(list(file.rows(range(100)))) == 100
    with pytest.raises(ManifestError, match="the rows that the checksum of block 21 covers"):
        list(file.rows([399]))
    with pytest.raises(ManifestError):
        file.columns()


def test_coordinates_that_a_rank_has_not_are_not_said(opened: Opened, part: Part) -> None:
    part["coordinates"] = [[0, -1, 1], [1, 2, -1]]
    file = opened(index_bytes.encode(part))
    assert [file.coordinates_of(n) for n in (0, 1)] == [{"rank": 0, "tensor": 1}, {"rank": 1, "pipeline": 2}]
    assert file.ranks_at({"tensor": 1}, ("pipeline", "tensor")) == [0]
    assert file.ranks_at({"pipeline": 2}, ("pipeline", "tensor", "context")) == [1]
    assert file.ranks_at({}, ("context",)) == [0, 1]


def test_all_that_is_read_can_be_written_again(part: Part, opened: Opened) -> None:
    data = index_bytes.encode(part)
    assert opened(data).columns().to_bytes() == data
    assert np.array_equal(opened(data).all_rows()["rank"], [row["rank"] for row in part["rows"]])

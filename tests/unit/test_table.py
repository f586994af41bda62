"""Chunk tables: a header and one row a chunk, each row checked against its key and its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.errors import ManifestError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.format.schema import ParameterGroup, TableHeader
from mbridge_fsdp_ckpt.storage.format.table import Chunk, Row, Scalar, read_table, read_table_header, table_bytes
from mbridge_fsdp_ckpt.storage.ranges import ByteRange

SUM = "xxh3_64:0123456789abcdef"
KEYS = {
    "weight": KeyEntry(dtype="float32", shape=(4, 3)),
    "step": KeyEntry(dtype="int64", shape=(), kind="int"),
    "single": KeyEntry(dtype="int64", shape=()),
    "steps": KeyEntry(dtype="int64", shape=(1,), kind="int"),
}
HEADER = TableHeader(
    rank=2,
    coordinates={"rank": 2, "tensor": 1},
    files=(FileEntry(name="__2_0.distcp", size=1000, checksum="xxh3_64:01"),),
    keys=KEYS,
    parameter_groups=(ParameterGroup(hyperparameters={"lr": 0.1}, parameters=("weight",)),),
    stateless=("bias",),
    values={"rng_state": [1, 2]},
    chunks=2,
)
CHUNKS: list[Row] = [
    Chunk("weight", 0, ByteRange(164, 24), Box((1, 0), (2, 3)), SUM, ByteRange(100, 200)),
    Scalar("step", b"\x07" + bytes(7)),
]
ROW = ["weight", 0, 164, 24, [1, 0], [2, 3], SUM, 100, 200]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "chunks_00002.jsonl"
    path.write_bytes(table_bytes(HEADER, CHUNKS))
    return path


def with_row(table: Path, row: Any) -> Path:
    """Put another row in the place of the first."""
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    return table


def with_header(table: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    first, *rest = table.read_text().splitlines()
    header = json.loads(first)
    change(header)
    table.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    return table


def test_a_table_is_read_back(table: Path) -> None:
    assert list(read_table(table, KEYS)) == CHUNKS
    header = read_table_header(table)
    assert (header.rank, header.files, header.keys, header.chunks) == (2, HEADER.files, KEYS, 2)
    assert (header.coordinates, header.stateless) == (HEADER.coordinates, ("bias",))
    assert (header.parameter_groups, header.values) == (HEADER.parameter_groups, HEADER.values)


def test_a_table_is_json_lines_in_the_documented_order(table: Path) -> None:
    first, *rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert first["rank"] == 2
    assert rows == [ROW, ["step", "0700000000000000"]]


def test_an_empty_chunk_fits(table: Path) -> None:
    with_row(table, ["weight", 0, 164, 0, [4, 0], [0, 3], SUM, 100, 200])
    assert next(read_table(table, KEYS)).box == Box((4, 0), (0, 3))


def test_a_chunk_may_fill_its_record_and_its_file(table: Path) -> None:
    with_row(table, ["weight", 0, 976, 24, [1, 0], [2, 3], SUM, 976, 24])
    assert next(read_table(table, KEYS)) == Chunk(
        "weight", 0, ByteRange(976, 24), CHUNKS[0].box, SUM, ByteRange(976, 24)
    )


@pytest.mark.parametrize("number", [-1, 2**63, 10**30, True, 1.0, "1", None, [1]])
@pytest.mark.parametrize("field", [1, 2, 3, 7, 8])
def test_a_number_that_is_none_is_refused(table: Path, field: int, number: Any) -> None:
    row = list(ROW)
    row[field] = number
    with pytest.raises(ManifestError, match="a chunk: key, file, elements_offset"):
        list(read_table(with_row(table, row), KEYS))


@pytest.mark.parametrize("box", [[True, 0], [-1, 0], [1.0, 0], ["1", 0], [2**63, 0], 1, None, "10", {"1": 0}])
@pytest.mark.parametrize("field", [4, 5])
def test_a_box_that_is_none_is_refused(table: Path, field: int, box: Any) -> None:
    row = list(ROW)
    row[field] = box
    with pytest.raises(ManifestError, match="a chunk: key, file, elements_offset"):
        list(read_table(with_row(table, row), KEYS))


@pytest.mark.parametrize("empty", ["", {}])
def test_an_empty_text_is_no_box_of_a_scalar(table: Path, empty: Any) -> None:
    with pytest.raises(ManifestError, match="a chunk: key, file, elements_offset"):
        list(read_table(with_row(table, ["single", 0, 164, 8, empty, empty, SUM, 100, 200]), KEYS))


def test_a_0_d_tensor_that_is_sharded_lies_in_a_file(table: Path) -> None:
    with_row(table, ["single", 0, 164, 8, [], [], SUM, 100, 200])
    assert next(read_table(table, KEYS)).box == Box((), ())


ELEMENT = "0700000000000000"


@pytest.mark.parametrize(
    ("row", "match"),
    [
        pytest.param(["step", 0, 164, 8, [], [], SUM, 100, 200], "its element in the table", id="in a file"),
        pytest.param(["weight", ELEMENT], "chunks in files", id="a sharded tensor"),
        pytest.param(["single", ELEMENT], "chunks in files", id="a sharded tensor of one element"),
        pytest.param(["steps", ELEMENT], r"one int64 of shape \[\]", id="a tensor of one dimension"),
        pytest.param(["absent", ELEMENT], "key 'absent'", id="unknown key"),
        pytest.param(["step", ELEMENT[2:]], "7 bytes", id="too short"),
        pytest.param(["step", ELEMENT + "00"], "9 bytes", id="too long"),
        *(
            pytest.param(["step", element], "a number: key, elements", id=f"{element!r}"[:20])
            for element in (
                "",
                "0",
                "zz" * 8,
                "AB" * 8,
                f" {ELEMENT}",
                f"{ELEMENT}\n",
                "0x" * 8,
                7,
                7.0,
                None,
                [ELEMENT],
            )
        ),
        pytest.param([7, ELEMENT], "a number: key, elements", id="key no text"),
        pytest.param([["step"], ELEMENT], "a number: key, elements", id="key a list"),
        pytest.param({"step": ELEMENT, "x": 1}, "a chunk", id="an object"),
        pytest.param("ab", "a chunk", id="a text"),
    ],
)
def test_a_number_that_breaks_a_rule_is_refused(table: Path, row: Any, match: str) -> None:
    with pytest.raises(ManifestError, match=match) as caught:
        list(read_table(with_row(table, row), KEYS))
    assert caught.value.key == str(table)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        pytest.param(ROW[:-1], "a chunk", id="a field too few"),
        pytest.param([*ROW, 1], "a chunk", id="a field too many"),
        pytest.param([], "a chunk", id="no fields"),
        pytest.param(5, "a chunk", id="no list"),
        pytest.param("123456789", "a chunk", id="a text"),
        pytest.param(dict(zip("abcdefghi", ROW, strict=True)), "a chunk", id="an object"),
        pytest.param([5, *ROW[1:]], "a chunk", id="key no text"),
        pytest.param([["weight"], *ROW[1:]], "a chunk", id="key a list"),
        pytest.param([*ROW[:6], None, *ROW[7:]], "a chunk.*found field 6: ", id="checksum no text"),
        pytest.param([*ROW[:6], SUM[:-1], *ROW[7:]], "a chunk.*found field 6: ", id="checksum too short"),
        pytest.param([*ROW[:6], SUM.upper(), *ROW[7:]], "a chunk.*found field 6: ", id="checksum in capitals"),
        pytest.param([*ROW[:6], f"{SUM}\n", *ROW[7:]], "a chunk.*found field 6: ", id="checksum and a line's end"),
        pytest.param([*ROW[:4], [1, "0"], *ROW[5:]], r"a chunk.*found field 4\.1: ", id="box offset no number"),
        pytest.param([*ROW[:5], [2], *ROW[6:]], "a chunk", id="offset and size of two ranks"),
        pytest.param(["absent", *ROW[1:]], "key 'absent'", id="unknown key"),
        pytest.param([*ROW[:4], [3, 0], *ROW[5:]], "inside shape", id="box beyond the last row"),
        pytest.param([*ROW[:4], [1, 1], *ROW[5:]], "inside shape", id="box beyond the last column"),
        pytest.param([*ROW[:4], [1], [2], *ROW[6:]], "inside shape", id="box of another rank"),
        pytest.param([*ROW[:3], 23, *ROW[4:]], "6 elements of float32", id="too short"),
        pytest.param([*ROW[:3], 28, *ROW[4:]], "6 elements of float32", id="too long"),
        pytest.param(["weight", 1, *ROW[2:]], "one of 1 files", id="file that is not listed"),
        pytest.param([*ROW[:2], 99, *ROW[3:]], "bytes inside", id="before its record"),
        pytest.param([*ROW[:2], 277, *ROW[3:]], "bytes inside", id="beyond its record"),
        pytest.param([*ROW[:7], 100, 901], "bytes inside", id="record beyond the file"),
        pytest.param([*ROW[:2], 2**62, *ROW[3:7], 2**62, 2**62], "bytes inside", id="far beyond the file"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(table: Path, row: Any, match: str) -> None:
    with pytest.raises(ManifestError, match=match) as caught:
        list(read_table(with_row(table, row), KEYS))
    assert caught.value.key == str(table)


def test_missing_and_added_rows_are_seen(table: Path) -> None:
    lines = table.read_text().splitlines(keepends=True)
    for rows in ([*lines[:-1]], [*lines, lines[-1]]):
        table.write_text("".join(rows))
        with pytest.raises(ManifestError, match="2 chunks"):
            list(read_table(table, KEYS))


@pytest.mark.parametrize("cut", [1, 20])
def test_a_truncated_row_is_refused(table: Path, cut: int) -> None:
    data = table.read_bytes()
    table.write_bytes(data[: -cut - 1])
    with pytest.raises(ManifestError, match="JSON"):
        list(read_table(table, KEYS))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"", "JSON"),
        (b"nonsense", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"\n", "JSON"),
        (b'["weight"', "JSON"),
        (json.dumps([*ROW[:2], float("nan"), *ROW[3:]]).encode(), "JSON"),
        (json.dumps([*ROW[:2], 10**4000, *ROW[3:]]).encode(), "a chunk.*found field 2: "),
        (b"[" + b"9" * 5000 + b"]", "JSON"),
        (b'{"weight": 0, "weight": 1}', "duplicate key 'weight'"),
        (json.dumps(ROW).encode().replace(b"weight", b"\xff"), "JSON"),
        (json.dumps(ROW).encode().replace(b"weight", b"\\ud800"), "a chunk"),
        (json.dumps(ROW).encode() * 2, "JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_row_that_is_not_json_is_refused(table: Path, line: bytes, match: str) -> None:
    first = table.read_bytes().splitlines(keepends=True)[0]
    table.write_bytes(first + line + b"\n")
    with pytest.raises(ManifestError, match=f"(?s){match}"):
        list(read_table(table, KEYS))


@pytest.mark.parametrize("text", ["", "\n", "null\n", "[]\n", "{}\n", "[" * 100_000])
def test_a_table_without_a_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "table").write_text(text)
    for read in (read_table_header, lambda path: list(read_table(path, KEYS))):
        with pytest.raises(ManifestError):
            read(tmp_path / "table")


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("chunks", lambda header: header.update(chunks=True)),
        ("chunks", lambda header: header.update(chunks=-1)),
        ("chunks", lambda header: header.pop("chunks")),
        ("rank", lambda header: header.update(rank="2")),
        ("coordinates.rank", lambda header: header["coordinates"].update(rank=True)),
        ("coordinates.rank", lambda header: header["coordinates"].update(rank="2")),
        ("coordinates.rank", lambda header: header["coordinates"].update(rank=-1)),
        ("files.0.name", lambda header: header["files"][0].update(name="../../x")),
        ("files.0.size", lambda header: header["files"][0].update(size=2**63)),
        ("keys.weight.dtype", lambda header: header["keys"]["weight"].update(dtype="object")),
        ("stateless", lambda header: header.update(stateless="bias")),
        ("parameter_groups", lambda header: header.update(parameter_groups=5)),
        ("parameter_groups", lambda header: header["parameter_groups"][0].pop("parameters")),
        ("parameter_groups", lambda header: header["parameter_groups"][0].pop("hyperparameters")),
        ("parameter_groups", lambda header: header["parameter_groups"][0].update(parameters=[5])),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_by_name(
    table: Path, where: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    with pytest.raises(ManifestError) as caught:
        read_table_header(with_header(table, change))
    assert where in caught.value.found
    assert caught.value.key == str(table)


def test_unknown_fields_of_a_newer_minor_version_are_passed_over(table: Path) -> None:
    with_header(table, lambda header: header.update(future=1))
    assert list(read_table(table, KEYS)) == CHUNKS

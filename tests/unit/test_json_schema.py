"""docs/schema has the schemas of the code, and both accept and refuse alike."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.storage.format.manifest import read_manifest
from mbridge_fsdp_ckpt.storage.format.table import read_table, read_table_header
from tests.soak import forge
from tests.unit import handmade
from tools.json_schema import schemas, text

FOLDER = Path(__file__).parents[2] / "docs" / "schema"
MANIFEST, HEADER, ROW = "manifest.schema.json", "chunk_table_header.schema.json", "chunk_row.schema.json"
SUM = "xxh3_64:0123456789abcdef"
FILE = {"name": "x", "size": 1, "checksum": SUM}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def validator(name: str) -> Draft202012Validator:
    """Of a committed schema."""
    return Draft202012Validator(json.loads((FOLDER / name).read_text()))


def changed(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value; ... deletes."""
    body = copy.deepcopy(body)
    here = body
    for part in path[:-1]:
        here = here[part]
    if value is ...:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return body


def test_the_committed_schemas_are_those_of_the_code() -> None:
    run = "run: python -m tools.json_schema"
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == {
        name: text(schema) for name, schema in schemas().items()
    }, run


@pytest.mark.parametrize("name", [MANIFEST, HEADER, ROW])
def test_a_schema_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(json.loads((FOLDER / name).read_text()))


def check_directory(directory: Path) -> int:
    """Validate a checkpoint's manifest and tables; the number of rows."""
    validator(MANIFEST).validate(forge.read_manifest(directory))
    rows = 0
    for table in sorted(directory.glob("chunks_*.jsonl")):
        header, *lines = table.read_text().splitlines()
        validator(HEADER).validate(json.loads(header))
        for line in lines:
            validator(ROW).validate(json.loads(line))
            rows += 1
    return rows


def test_a_checkpoint_is_valid(directory: Path) -> None:
    assert check_directory(directory) == 6


GOOD: list[tuple[tuple[str | int, ...], Any]] = [
    (("version",), [1, 7]),
    (("from a newer minor version",), {"x": 1}),
    (("values",), None),
    (("values",), {"x": [1, None, {"$tuple": []}]}),
    (("writer",), {}),
    (("topology",), {"world": 1, "strategy": "optim_grads_params/outer"}),
    (("sections",), ["model"]),
    (("files",), ...),
    (("files",), [{**FILE, "name": "sub/x"}]),
    (("files",), [{**FILE, "name": "...x"}]),
    (("tables",), []),
    (("keys", handmade.WEIGHT, "unpadded_rows"), 5),
    (("keys", handmade.WEIGHT, "unpadded_rows"), None),
    (("keys", handmade.WEIGHT, "family"), "gated_linear_unit/1"),
    (("keys", handmade.WEIGHT, "shape"), [0]),
    (("keys", handmade.WEIGHT, "kind"), ...),
]
BAD: list[tuple[tuple[str | int, ...], Any]] = [
    *(((field,), ...) for field in ("format", "version", "writer", "topology", "sections", "keys", "tables", "values")),
    (("format",), "fsdp_dtensor"),
    (("format",), None),
    (("version",), [2, 0]),
    (("version",), [1]),
    (("version",), [1, 0, 0]),
    (("version",), "1.0"),
    (("version",), [1, -1]),
    (("writer",), {"torch": 2}),
    (("writer",), None),
    (("topology",), {"world": -1}),
    (("topology",), {"world": 1.5}),
    (("topology",), {"world": [1]}),
    (("sections",), "model"),
    (("sections",), [1]),
    (("sections",), ["model", "<img src=x onerror=alert(1)>"]),
    (("keys",), []),
    (("keys", handmade.WEIGHT), None),
    (("keys", handmade.WEIGHT, "dtype"), ...),
    (("keys", handmade.WEIGHT, "dtype"), 5),
    (("keys", handmade.WEIGHT, "shape"), ...),
    (("keys", handmade.WEIGHT, "shape"), 12),
    (("keys", handmade.WEIGHT, "shape"), [-1]),
    (("keys", handmade.WEIGHT, "shape"), [1 << 63]),
    (("keys", handmade.WEIGHT, "shape"), ["4", "3"]),
    (("keys", handmade.WEIGHT, "shape"), [True]),
    (("keys", handmade.WEIGHT, "kind"), "code"),
    (("keys", handmade.WEIGHT, "family"), 1),
    (("keys", handmade.WEIGHT, "component"), None),
    (("keys", handmade.WEIGHT, "unpadded_rows"), -1),
    (("tables",), {}),
    (("tables", 0, "rank"), ...),
    (("tables", 0, "rank"), "0"),
    (("tables", 0, "size"), -1),
    (("tables", 0, "checksum"), ...),
    (("tables", 0, "checksum"), None),
    *((("tables", 0, "name"), name) for name in ("", ".", "..", "a/b", "/a", "a\\b", "a\0b", "../x", "x" * 256, 5)),
    *((("files",), [{**FILE, "name": name}]) for name in ("", "..", "/x", "x/", "a//b", "a/../b", "a\\b", "./x")),
    (("files",), None),
    (("files",), ["x"]),
]


@pytest.mark.parametrize(("path", "value"), GOOD, ids=repr)
def test_what_the_code_reads_the_schema_accepts(directory: Path, path: tuple[str | int, ...], value: Any) -> None:
    forge.sign(directory, changed(forge.read_manifest(directory), path, value))
    validator(MANIFEST).validate(forge.read_manifest(directory))
    assert read_manifest(directory).version[0] == 1


@pytest.mark.parametrize(("path", "value"), BAD, ids=lambda value: repr(value)[:60])
def test_what_the_schema_refuses_the_code_does_not_read(
    directory: Path, path: tuple[str | int, ...], value: Any
) -> None:
    forge.sign(directory, changed(forge.read_manifest(directory), path, value))
    assert not validator(MANIFEST).is_valid(forge.read_manifest(directory))
    with pytest.raises(CheckpointError):
        read_manifest(directory)


def test_a_manifest_without_checksum_is_refused_by_both(directory: Path) -> None:
    body = forge.read_manifest(directory)
    body.pop("checksum")
    (directory / "manifest.json").write_text(json.dumps(body))
    assert not validator(MANIFEST).is_valid(body)
    with pytest.raises(CheckpointError):
        read_manifest(directory)


BAD_HEADERS: list[tuple[tuple[str | int, ...], Any]] = [
    *(((field,), ...) for field in ("rank", "coordinates", "files", "keys", "chunks")),
    (("rank",), -1),
    (("coordinates",), {"rank": "0"}),
    (("files", 0, "name"), "../x"),
    (("files", 0, "size"), None),
    (("parameter_groups",), [{"parameters": []}]),
    (("parameter_groups",), [{"parameters": [5], "hyperparameters": {}}]),
    (("stateless",), "x"),
    (("stateless",), [None]),
    (("chunks",), True),
]


@pytest.mark.parametrize(("path", "value"), BAD_HEADERS, ids=lambda value: repr(value)[:60])
def test_a_bad_header_is_refused_by_both(directory: Path, path: tuple[str | int, ...], value: Any) -> None:
    table = directory / handmade.table(0)
    first, *rest = table.read_text().splitlines()
    header = changed(json.loads(first), path, value)
    table.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    assert not validator(HEADER).is_valid(header)
    with pytest.raises(CheckpointError):
        read_table_header(table)


NO_COUNTS: list[Any] = [-1, 1 << 63, True, "0", None, 0.5]
NO_BOXES: list[Any] = [0, None, [-1, 0], [True, 0], ["0", 0], {}]
BAD_ROWS: list[tuple[int, Any]] = [
    *((field, value) for field in (1, 2, 3, 7, 8) for value in NO_COUNTS),
    *((field, value) for field in (4, 5) for value in NO_BOXES),
    (0, 5),
    (6, None),
    (6, ""),
    (6, SUM[:-1]),
    (6, SUM.upper()),
]


@pytest.mark.parametrize(("field", "value"), BAD_ROWS, ids=repr)
def test_a_bad_row_is_refused_by_both(directory: Path, field: int, value: Any) -> None:
    table = directory / handmade.table(0)
    header, first, *rest = table.read_text().splitlines()
    row = changed(json.loads(first), (field,), value)
    table.write_text("\n".join([header, json.dumps(row), *rest]) + "\n")
    assert not validator(ROW).is_valid(row)
    with pytest.raises(CheckpointError):
        list(read_table(table, handmade.KEYS))


@pytest.mark.parametrize("row", [[5, "00"], ["x", 0], ["x", None], ["x", ""], ["x", "0"], ["x", "AB"], ["x", "0g"]])
def test_a_bad_row_of_a_number_is_refused_by_both(directory: Path, row: list[Any]) -> None:
    table = directory / handmade.table(0)
    header, _, *rest = table.read_text().splitlines()
    table.write_text("\n".join([header, json.dumps(row), *rest]) + "\n")
    assert not validator(ROW).is_valid(row)
    with pytest.raises(CheckpointError):
        list(read_table(table, handmade.KEYS))


@pytest.mark.parametrize("fields", [0, 1, 3, 8, 10])
def test_a_row_of_other_length_is_refused_by_both(directory: Path, fields: int) -> None:
    table = directory / handmade.table(0)
    header, first, *rest = table.read_text().splitlines()
    row = (json.loads(first) * 2)[:fields]
    table.write_text("\n".join([header, json.dumps(row), *rest]) + "\n")
    assert not validator(ROW).is_valid(row)
    with pytest.raises(CheckpointError):
        list(read_table(table, handmade.KEYS))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""docs/schema has the schemas of the code, and both accept and refuse alike."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import Files
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from tests.soak import forge
from tests.unit import handmade, index_bytes
from tools.json_schema import schemas, text

FOLDER = Path(__file__).parents[2] / "docs" / "schema"
MANIFEST, HEADER, RECORD = "manifest.schema.json", "index_header.schema.json", "index_record.schema.json"
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


@pytest.mark.parametrize("name", [MANIFEST, HEADER, RECORD])
def test_a_schema_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(json.loads((FOLDER / name).read_text()))


def check_directory(directory: Path) -> int:
    """Validate a checkpoint's manifest, and headers and records of its index files; how many of these there are."""
    validator(MANIFEST).validate(forge.read_manifest(directory))
    found = 0
    for path in sorted(directory.glob("*.index")):
        part = index_bytes.decode(path.read_bytes())
        validator(HEADER).validate(part["header"])
        if part["record"]:
            validator(RECORD).validate(json.loads(part["record"]))
        found += 1
    return found


def test_a_checkpoint_is_valid(directory: Path) -> None:
    assert check_directory(directory) == 3


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
    (("index",), []),
    (("suffix",), ...),
    (("suffix",), "-0123456789ab"),
    (("families",), {"gated/1": "model.weight"}),
    (("slots",), ...),
    (("hyperparameters",), {"0123456789abcdef": {"lr": 0.1}}),
    (("states",), ...),
    (("keys",), 0),
]
NO_SETS: list[Any] = [[], {"x": {}}, {"0" * 16: [1]}]
NO_COUNTS: list[Any] = [-1, 1 << 63, "1", None, [], True]
BAD: list[tuple[tuple[str | int, ...], Any]] = [
    *(
        ((field,), ...)
        for field in (
            "format",
            "version",
            "writer",
            "topology",
            "sections",
            "save",
            "keys",
            "chunks",
            "index",
            "values",
        )
    ),
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
    *(((field,), count) for field in ("keys", "chunks", "states") for count in NO_COUNTS),
    *((("save",), save) for save in ("", "0123456789a", "0123456789AB", 5, None)),
    *((("suffix",), suffix) for suffix in ("-", "0123456789ab", "/../x", None)),
    (("families",), {"x/1": 1}),
    (("slots",), [1]),
    *((("hyperparameters",), sets) for sets in NO_SETS),
    (("index",), {}),
    (("index", 0, "rank"), ...),
    (("index", 0, "rank"), "0"),
    (("index", 0, "size"), -1),
    (("index", 0, "checksum"), ...),
    (("index", 0, "checksum"), None),
    *((("index", 0, "name"), name) for name in ("", ".", "..", "a/b", "/a", "a\\b", "a\0b", "../x", "x" * 256, 5)),
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
    *(((field,), ...) for field in ("save", "suffix", "axes", "entries", "dimensions", "record_checksum")),
    (("save",), "x"),
    (("suffix",), "/../x"),
    (("axes",), "rank"),
    (("axes",), [5]),
    (("entries",), {}),
    *((("dimensions",), number) for number in (0, 65, -1, "2", None)),
    *((("record_checksum",), text) for text in ("", "0" * 15, "A" * 16, 5, None)),
    *((("entries", 0, "dtype"), value) for value in (..., 5)),
    *((("entries", 0, "shape"), value) for value in (..., 12, [-1], [1 << 63], ["4", "3"], [True])),
    (("entries", 0, "kind"), "code"),
    (("entries", 0, "family"), 1),
    (("entries", 0, "component"), None),
    (("entries", 0, "unpadded_rows"), -1),
    *(
        ((field,), count)
        for field in ("ranks", "keys", "names", "numbers", "rows", "texts", "record")
        for count in (..., -1, 1 << 63, True, "0", None, 0.5)
    ),
]


def index_with(data: bytes, path: tuple[str | int, ...], value: Any) -> tuple[bytes, Any]:
    """An index file with another header, signed; and that header."""
    body = changed(index_bytes.header_of(data), path, value)
    return index_bytes.with_header(data, json.dumps(body).encode()), body


def opened(path: Path) -> IndexFile:
    return IndexFile(path, path.stat().st_size, Files(handmade.SAVE), OpenFiles())


GOOD_HEADERS: list[tuple[tuple[str | int, ...], Any]] = [
    (("from a newer minor version",), {"x": 1}),
    (("entries", 0, "family"), "gated_linear_unit/1"),
    (("entries", 0, "kind"), ...),
    (("entries", 0, "unpadded_rows"), 5),
    (("entries", 0, "unpadded_rows"), None),
]


@pytest.mark.parametrize(("path", "value"), GOOD_HEADERS, ids=repr)
def test_a_header_that_the_code_reads_the_schema_accepts(
    directory: Path, path: tuple[str | int, ...], value: Any
) -> None:
    file = directory / handmade.index(0)
    data, body = index_with(file.read_bytes(), path, value)
    file.write_bytes(data)
    validator(HEADER).validate(body)
    assert opened(file).find(handmade.WEIGHT) is not None


@pytest.mark.parametrize(("path", "value"), BAD_HEADERS, ids=lambda value: repr(value)[:60])
def test_a_bad_header_is_refused_by_both(directory: Path, path: tuple[str | int, ...], value: Any) -> None:
    file = directory / handmade.index(0)
    data, body = index_with(file.read_bytes(), path, value)
    file.write_bytes(data)
    assert not validator(HEADER).is_valid(body)
    with pytest.raises(CheckpointError, match="a valid IndexHeader"):
        opened(file)


@pytest.mark.parametrize("record", [b"[]", b"null", b"5", b'"values"'])
def test_a_bad_record_is_refused_by_both(directory: Path, record: bytes) -> None:
    file = directory / handmade.index(0)
    file.write_bytes(index_bytes.encode(index_bytes.decode(file.read_bytes()) | {"record": record}))
    assert not validator(RECORD).is_valid(json.loads(record))
    with pytest.raises(CheckpointError):
        opened(file).record()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The metadata of a checkpoint: what is written is read back, and each rule refuses what breaks it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mbridge_fsdp_ckpt.errors import (
    DamagedCheckpointError,
    ManifestError,
    NotACheckpointError,
    UnsupportedVersionError,
)
from mbridge_fsdp_ckpt.format import manifest as module
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import check_file
from tests.unit.handmade import write_manifest

Body = dict[str, Any]
Change = Callable[[Body], Any]


def metadata(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "writer": {"torch": "2.13.0"},
        "topology": {"world": 4, "tensor": 2, "strategy": "optim_grads_params"},
        "sections": ("model", "optimizer"),
        "save": "0123456789ab",
        "suffix": "-0123456789ab",
        "families": {"gated/1": "model.weight_w"},
        "slots": ("exp_avg", "step"),
        "hyperparameters": {"0123456789abcdef": {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}},
        "keys": 2,
        "chunks": 5,
        "states": 1,
        "index": (IndexEntry(name="group_00000.index", size=10, checksum="xxh3_64:00", rank=0),),
        "values": {"iteration": 10, "betas": {"$tuple": [0.9, 0.1 + 0.2]}},
    }
    return Manifest(**fields | changes)


@pytest.fixture
def body(tmp_path: Path) -> Body:
    """A valid manifest as JSON data."""
    write_manifest(tmp_path / "manifest.json", metadata())
    body: Body = json.loads((tmp_path / "manifest.json").read_text())
    return body


def write(directory: Path, body: Body) -> None:
    """Write a manifest by hand, with the checksum that belongs to it."""
    body = {name: value for name, value in body.items() if name != "checksum"}
    covered = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["checksum"] = f"xxh3_64:{xxhash.xxh3_64_hexdigest(covered)}"
    (directory / "manifest.json").write_text(json.dumps(body))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", metadata())
    found = read_manifest(tmp_path)
    assert found.model_copy(update={"checksum": ""}) == metadata()
    assert found.checksum == json.loads((tmp_path / "manifest.json").read_text())["checksum"]


def test_the_file_is_standard_json_whose_checksum_covers_the_rest(tmp_path: Path, body: Body) -> None:
    digest = body.pop("checksum")
    covered = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert digest == f"xxh3_64:{xxhash.xxh3_64_hexdigest(covered)}"
    assert (body["format"], body["version"]) == ("fsdp_dtensor_safe", [1, 0])
    assert (body["save"], body["suffix"]) == ("0123456789ab", "-0123456789ab")
    assert (body["keys"], body["chunks"], body["states"]) == (2, 5, 1)
    assert body["families"] == {"gated/1": "model.weight_w"}
    assert body["hyperparameters"] == {"0123456789abcdef": {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}}
    assert body["index"] == [{"name": "group_00000.index", "size": 10, "checksum": "xxh3_64:00", "rank": 0}]
    write(tmp_path, body)
    assert read_manifest(tmp_path).model_copy(update={"checksum": ""}) == metadata()


def test_two_manifests_of_one_content_have_one_checksum(tmp_path: Path, body: Body) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(dict(reversed(body.items())), indent=4))
    assert read_manifest(tmp_path).checksum == body["checksum"]


def test_unknown_fields_of_a_newer_minor_version_are_passed_over(tmp_path: Path, body: Body) -> None:
    body["version"] = [1, 7]
    body["future"] = {"anything": [1]}
    body["index"][0]["future"] = 1
    write(tmp_path, body)
    assert read_manifest(tmp_path).index == metadata().index


@pytest.mark.parametrize("version", [[2, 0], [2], [99, "x", None]])
def test_a_newer_major_version_says_so_whatever_else_is_new(tmp_path: Path, version: list[Any]) -> None:
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": FORMAT_NAME, "version": version, "checksum": "new form"})
    )
    with pytest.raises(UnsupportedVersionError, match="newer release") as caught:
        read_manifest(tmp_path)
    assert caught.value.key == str(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "version", ["1.0", None, [], 1, [True, 0], ["1", 0], [1.0, 0], [1], [1, 0, 0], [1, -1], [-1, 0]]
)
def test_a_malformed_version_is_refused(tmp_path: Path, body: Body, version: Any) -> None:
    body["version"] = version
    write(tmp_path, body)
    with pytest.raises(ManifestError, match="version"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["values"].update(iteration=11),
        lambda body: body["hyperparameters"].clear(),
        lambda body: body["index"][0].update(size=11),
        lambda body: body.update(future=1),
        lambda body: body.pop("checksum"),
        lambda body: body.update(checksum=None),
        lambda body: body.update(checksum=["xxh3_64:00"]),
    ],
)
def test_content_that_changed_after_it_was_written_is_refused(tmp_path: Path, body: Body, change: Change) -> None:
    change(body)
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(ManifestError, match="checksum"):
        read_manifest(tmp_path)


def group(name: str, value: Any) -> Change:
    return lambda body: body["index"][0].update({name: value})


def root(name: str, value: Any) -> Change:
    return lambda body: body.update({name: value})


BAD_SETS: list[Any] = [[], {"x": {}}, {"0" * 15: {}}, {"A" * 16: {}}]
BAD_NUMBERS = [-1, 2**63, 10**30, True, 1.0, "1", None]


@pytest.mark.parametrize(
    ("where", "change"),
    [
        *[(count, root(count, number)) for count in ("keys", "chunks", "states") for number in BAD_NUMBERS],
        *[
            ("save", root("save", save))
            for save in ("", "0123456789a", "0123456789abc", "0123456789aB", "/../../../..", 5)
        ],
        *[("suffix", root("suffix", suffix)) for suffix in ("-", "0123456789ab", "-0123456789ab\n", "/../x", None)],
        ("save", lambda body: body.pop("save")),
        ("families", root("families", {"x/1": 5})),
        ("slots", root("slots", "step")),
        *[("hyperparameters", root("hyperparameters", sets)) for sets in BAD_SETS],
        ("hyperparameters", root("hyperparameters", {"0" * 16: [1]})),
        ("index", lambda body: body["index"].append(dict(body["index"][0], name="group_00001.index"))),
        ("index", lambda body: body["index"].append(dict(body["index"][0], rank=1))),
        *[("size", group("size", number)) for number in BAD_NUMBERS],
        *[("rank", group("rank", number)) for number in BAD_NUMBERS],
        *[("name", group("name", name)) for name in ("../x", "/etc/passwd", "a/b", "", ".", "..", "a\\b", "a\0b", 5)],
        ("checksum", group("checksum", 5)),
        ("size", lambda body: body["index"][0].pop("size")),
        ("keys", root("keys", [])),
        ("index", root("index", {})),
        ("index", lambda body: body.pop("index")),
        ("writer", root("writer", {"torch": 2})),
        ("topology", root("topology", {"world": [4]})),
        *[("topology", root("topology", {"world": number})) for number in (-1, True, 1.0, None)],
        ("sections", root("sections", "model")),
        ("values", lambda body: body.pop("values")),
    ],
)
def test_a_field_that_breaks_a_rule_is_refused_by_name(tmp_path: Path, body: Body, where: str, change: Change) -> None:
    change(body)
    write(tmp_path, body)
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert where in caught.value.found
    assert caught.value.key == str(tmp_path / "manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[1", '{"a": 1} x', "\0\0\0", "nul"])
def test_what_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="JSON"):
        read_manifest(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"format": "\xff\xfe"}')
    with pytest.raises(ManifestError, match="UnicodeDecodeError"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "5", '"fsdp_dtensor_safe"', "{}", '{"format": "torch_dist"}'])
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="fsdp_dtensor_safe manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("depth", [300, 900, 990, 1000, 1100, 2000, 5000, 9000, 11_000, 100_000])
def test_deep_nesting_never_ends_in_another_error(tmp_path: Path, body: Body, depth: int) -> None:
    text = json.dumps(body).replace('"iteration": 10', f'"iteration": {"[" * depth}{"]" * depth}')
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError):
        read_manifest(tmp_path)


def test_a_number_too_long_to_parse_is_refused(tmp_path: Path, body: Body) -> None:
    text = json.dumps(body).replace('"iteration": 10', f'"iteration": {"9" * 10_000}')
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="JSON"):
        read_manifest(tmp_path)


def test_a_file_too_large_is_refused_unread(tmp_path: Path, body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, body)
    size = (tmp_path / "manifest.json").stat().st_size
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", size)
    assert read_manifest(tmp_path).keys
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", size - 1)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("was read"))
    with pytest.raises(ManifestError, match=f"at most {size - 1} bytes"):
        read_manifest(tmp_path)


def test_a_directory_without_a_manifest_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="an empty directory"):
        read_manifest(tmp_path)
    (tmp_path / "common.pt").touch()
    with pytest.raises(NotACheckpointError, match=r"common\.pt"):
        read_manifest(tmp_path)
    with pytest.raises(NotACheckpointError, match="no such directory"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(NotACheckpointError, match="a file"):
        read_manifest(tmp_path / "common.pt")


def test_a_linked_manifest_is_refused(tmp_path: Path, body: Body) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, body)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to(elsewhere / "manifest.json")
    with pytest.raises(NotACheckpointError):
        read_manifest(tmp_path)


def test_a_file_is_checked_for_its_kind_and_size(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"12345")
    (tmp_path / "linked").symlink_to(tmp_path / "good")
    (tmp_path / "directory").mkdir()
    assert check_file(tmp_path, FileEntry(name="good", size=5, checksum="")) == tmp_path / "good"
    for name, size, found in [
        ("good", 4, "5 bytes"),
        ("good", 6, "5 bytes"),
        ("absent", 5, "no such file"),
        ("directory", 5, "no such file"),
        ("linked", 5, "a symbolic link"),
    ]:
        with pytest.raises(DamagedCheckpointError, match=found) as caught:
            check_file(tmp_path, FileEntry(name=name, size=size, checksum=""))
        assert caught.value.key == str(tmp_path / name)
    with pytest.raises(DamagedCheckpointError) as caught:
        check_file(tmp_path, FileEntry(name="absent", size=0, checksum=""))
    assert caught.value.expected == "file absent", "nobody knows its size"

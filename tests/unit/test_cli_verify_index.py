# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`verify`: index files that contradict their keys, each other or the manifest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.audit import Audit
from mbridge_fsdp_ckpt.tools.findings import Finding, Tiling
from tests.unit import handmade, index_bytes
from tests.unit.handmade import BIAS, GROUP, KEYS, STEP, WEIGHT, Change, Part, edit, edit_group, index, write_manifest
from tests.unit.test_cli_verify import audited, named


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def _twice(key: str) -> Change:
    def change(part: Part) -> None:
        held = handmade.key_of(part, key)
        part["rows"][held["first"] : held["first"]] = [dict(row) for row in handmade.rows_of(part, key)]
        for other in part["keys"]:
            if other["first"] > held["first"] and other["entry"] != list(KEYS).index(STEP):
                other["first"] += held["count"]
        held["count"] *= 2

    return change


def _moved(key: str, box: Box) -> Change:
    def change(part: Part) -> None:
        for row in handmade.rows_of(part, key):
            row.update(start=list(box.offset), extent=list(box.size))
        handmade.key_of(part, key)["origins"] = int(not any(box.offset))

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (partial(handmade.take_out, key=WEIGHT), "6 elements in its chunks"),
        (_twice(WEIGHT), "18 elements in its chunks"),
        (_moved(WEIGHT, Box((1, 0), (2, 3))), "as many, but some twice and some never"),
    ],
)
def test_chunks_that_do_not_tile_their_key_are_found(directory: Path, change: Change, found: str) -> None:
    edit(directory, 1, change)
    assert list(Audit(directory).findings()) == [
        Finding("tiling", "manifest.json", "each of 12 elements in one chunk", found, WEIGHT)
    ]


def test_two_that_wrote_the_first_element_are_found(directory: Path) -> None:
    """The group's index can be made by no writer, and what its ranks' own say contradicts itself."""
    edit(directory, 1, _moved(WEIGHT, handmade.UPPER))
    found = list(Audit(directory).findings())
    assert named(found) == [
        ("index", GROUP, None),
        ("keys", "manifest.json", WEIGHT),
        ("tiling", "manifest.json", WEIGHT),
    ]
    assert WEIGHT in found[0].found
    assert "several" in found[0].found
    assert (found[1].expected, found[1].found) == ("one rank to have written its first element", "2")


@pytest.mark.parametrize("key", [STEP, BIAS])
def test_a_key_that_no_rank_has_is_missed_by_number(directory: Path, key: str) -> None:
    edit(directory, 0 if key == STEP else 1, partial(handmade.take_out, key=key))
    assert list(Audit(directory).findings()) == [Finding("keys", "manifest.json", "4 keys", "3")]


def test_another_number_of_keys_than_the_manifest_says_is_found(directory: Path) -> None:
    metadata = read_manifest(directory)
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"keys": 5}))
    assert list(Audit(directory).findings()) == [Finding("keys", "manifest.json", "5 keys", "4")]


def test_a_checkpoint_without_groups_lacks_its_keys(directory: Path) -> None:
    metadata = read_manifest(directory)
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"index": ()}))
    assert list(Audit(directory).findings()) == [Finding("keys", "manifest.json", "4 keys", "0")]


def test_ranks_that_describe_a_key_differently_are_found(directory: Path) -> None:
    path = directory / index(1)
    part = index_bytes.decode(path.read_bytes())
    part["header"]["entries"][list(KEYS).index(WEIGHT)]["component"] = "w"
    path.write_bytes(index_bytes.encode(part))
    [finding] = Audit(directory).findings()
    assert (finding.subject, finding.file, finding.expected) == ("index", GROUP, OWN)
    assert finding.found == f"{WEIGHT}: different descriptions: ranks 0, 1 have the key"


OWN = "what its ranks' own index files make"


@pytest.mark.parametrize(
    "change",
    [
        lambda part: handmade.rows_of(part, WEIGHT)[1].update(lead=0),
        lambda part: part["coordinates"][1].__setitem__(0, 5),
        lambda part: part["numbers"][0].update(data=b"1234".ljust(16, b"\0")),
        lambda part: part["header"]["entries"][0].update(component="w"),
    ],
)
def test_an_index_that_its_ranks_own_do_not_make_is_found(directory: Path, change: Change) -> None:
    edit_group(directory, change)
    assert [finding for finding in Audit(directory).findings() if finding.file == GROUP] == [
        Finding("index", GROUP, OWN, "another")
    ]


@pytest.mark.parametrize("text", [WEIGHT, STEP, handmade.NAME.replace("weight", "frozen1")])
def test_a_key_or_a_name_that_is_not_found_by_its_hash_is_named(directory: Path, text: str) -> None:
    """A load would take it for absent; only who looks at all of them can tell."""
    other = text.upper()
    edit_group(directory, lambda part: part.update(texts=part["texts"].replace(text.encode(), other.encode())))
    assert (
        Finding("index", GROUP, "keys and names by their hashes", f"{other} by another") in Audit(directory).findings()
    )


def test_a_name_that_is_no_text_is_found(directory: Path) -> None:
    name = b"module.module.frozen1"
    edit_group(directory, lambda part: part.update(texts=part["texts"].replace(name, b"\xff" * len(name))))
    found = list(Audit(directory).findings())
    assert [finding.expected for finding in found] == ["keys and names in UTF-8", OWN]
    assert named(found) == [("index", GROUP, None)] * 2


def test_hyperparameters_that_the_head_does_not_have_are_found(directory: Path) -> None:
    edit_group(directory, lambda part: part["names"][0].update(value=5))
    assert [finding for finding in Audit(directory).findings() if finding.file == GROUP] == [
        Finding("index", GROUP, "hyperparameters that the metadata has", f"{5:016x}"),
        Finding("index", GROUP, OWN, "another"),
    ]


def test_copies_that_say_otherwise_than_the_index_are_found(directory: Path) -> None:
    part = index_bytes.decode((directory / index(1)).read_bytes())
    part["numbers"][0].update(data=b"1234".ljust(16, b"\0"))
    (directory / index(1)).write_bytes(index_bytes.encode(part))
    step = handmade.TENSORS[STEP].numpy().tobytes().hex()
    assert list(Audit(directory).findings()) == [
        Finding("index", index(1), f"{step} for {STEP}, as {GROUP} has it", b"1234".hex()),
    ]


def test_a_param_group_that_says_otherwise_than_its_parameters_is_found(directory: Path) -> None:
    part = index_bytes.decode((directory / index(0)).read_bytes())
    part["names"][-1].update(value=5)
    (directory / index(0)).write_bytes(index_bytes.encode(part))
    expected = "a param group with the hyperparameters of each parameter"
    assert list(Audit(directory).findings()) == [Finding("index", index(0), expected, f"none with {handmade.SET:016x}")]


def test_a_param_group_that_is_not_found_by_its_hash_is_named(directory: Path) -> None:
    """No load asks for it in vain: it finds each parameter in the group's index instead."""
    part = index_bytes.decode((directory / index(1)).read_bytes())
    part["names"][-1].update(hash=(1 << 64) - 1)
    (directory / index(1)).write_bytes(index_bytes.encode(part))
    [finding] = Audit(directory).findings()
    assert (finding.file, finding.expected) == (index(1), "keys and names by their hashes")


def test_an_index_of_another_payload_is_found(directory: Path) -> None:
    edit_group(directory, lambda part: part["ranks"][1].update(checksum=5))
    assert audited(directory) == [
        ("index", GROUP, None),
        ("index", index(1), None),
        ("file", handmade.payload(1), None),
    ]


def test_an_own_index_of_another_rank_is_found(directory: Path) -> None:
    (directory / index(1)).write_bytes((directory / index(0)).read_bytes())
    assert ("index", index(1), None) in audited(directory)


def test_an_own_index_of_another_save_is_found(directory: Path) -> None:
    part = index_bytes.decode((directory / index(1)).read_bytes())
    part["header"]["save"] = "f" * 12
    (directory / index(1)).write_bytes(index_bytes.encode(part))
    [finding] = Audit(directory).findings()
    assert (finding.subject, finding.file, finding.found) == ("index", index(1), "that of save ffffffffffff")


def test_a_row_outside_its_key_is_found(directory: Path) -> None:
    edit(directory, 1, _moved(WEIGHT, Box((3, 0), (2, 3))))
    assert audited(directory) == [("index", GROUP, None), ("index", index(1), None)]


def test_one_rank_alone_is_its_own_group(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000010"
    directory.mkdir()
    handmade.make_rank(directory, 0)
    part = index_bytes.decode((directory / index(0)).read_bytes())
    part = handmade.grouped([part]) | {"record": part["record"]}  # without what is private
    (directory / index(0)).write_bytes(data := index_bytes.encode(part))
    handmade.write_head(directory, [part])
    (directory / GROUP).unlink()
    metadata = read_manifest(directory)
    own = metadata.index[0].model_copy(
        update={"name": index(0), "size": len(data), "checksum": handmade.checksum(data)}
    )
    write_manifest(directory / "manifest.json", metadata.model_copy(update={"index": (own,), "keys": 3}))
    audit = Audit(directory)
    assert {finding.subject for finding in audit.findings()} == {"tiling"}
    assert (audit.checked["indexes"], audit.checked["files"]) == (1, 1)


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

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint made by hand, whole and damaged: what is wrong is named before payload is read."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, ManifestError, NotACheckpointError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.source import CheckpointSource
from mbridge_fsdp_ckpt.io.ranges import OpenFiles, Place, Scratch
from mbridge_fsdp_ckpt.opening import open_checkpoint, open_safe, open_stock
from mbridge_fsdp_ckpt.plan.boxes import Box
from tests.convert import storage_made
from tests.unit import handmade, index_bytes
from tests.unit.handmade import (
    AVERAGE,
    BIAS,
    GROUP,
    HYPERPARAMETERS,
    KEYS,
    LOWER,
    NAME,
    STEP,
    TENSORS,
    UPPER,
    VALUES,
    WEIGHT,
    index,
    payload,
)

NOWHERE = Place(0, np.empty(0, dtype=np.uint8))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def assemble(source: CheckpointSource, key: str) -> torch.Tensor:
    """A whole tensor from its chunks."""
    whole = torch.full(source.metadata.keys[key].shape, 99).to(getattr(torch, source.metadata.keys[key].dtype))
    for chunk in source.chunks([key])[key]:
        whole[tuple(slice(o, o + s) for o, s in zip(chunk.box.offset, chunk.box.size, strict=True))] = source.read(
            chunk
        )
    return whole


def test_the_head_is_open_to_all(directory: Path) -> None:
    source = open_checkpoint(directory)
    assert isinstance(source, SafeSource)
    assert source.metadata.keys == KEYS
    assert source.metadata.values == VALUES
    assert (source.metadata.sections, source.metadata.topology) == (("model", "optimizer"), {"world": 2, "tensor": 2})
    assert [r.stateless for r in source.ranks()] == [("module.module.frozen0",), ("module.module.frozen1",)]


@pytest.mark.parametrize("key", KEYS)
def test_every_tensor_is_read_back(directory: Path, key: str) -> None:
    found = assemble(open_checkpoint(directory), key)
    assert found.dtype == TENSORS[key].dtype
    assert torch.equal(found, TENSORS[key])


@pytest.mark.parametrize("verify", [True, False])
def test_a_part_of_a_chunk_goes_to_its_place(directory: Path, verify: bool) -> None:
    source = open_checkpoint(directory)
    memory = np.zeros(6, dtype=np.uint8)
    [_, lower] = source.chunks([WEIGHT])[WEIGHT]
    source.read_part(lower, Place(4, memory), Scratch(), verify=verify)
    assert torch.equal(torch.from_numpy(memory).view(torch.bfloat16), TENSORS[WEIGHT][2:].reshape(-1)[2:5])


def test_chunks_of_the_keys_that_were_asked_for(directory: Path) -> None:
    chunks = open_checkpoint(directory).chunks([WEIGHT, STEP])
    assert {key: [chunk.box for chunk in found] for key, found in chunks.items()} == {
        WEIGHT: [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))],
        STEP: [Box((), ())],
    }
    assert {chunk.path.name for chunk in chunks[WEIGHT]} == {payload(0), payload(1)}


def test_hyperparameters_come_back_for_the_names_that_have_some(directory: Path) -> None:
    assert open_checkpoint(directory).hyperparameters([NAME, "absent"]) == {NAME: HYPERPARAMETERS}


def test_each_rank_has_a_record(directory: Path) -> None:
    records = list(open_checkpoint(directory).ranks())
    assert [record.coordinates["rank"] for record in records] == [0, 1]
    assert records[1].values["rng_state"]["(0, 1)"][0]["torch_rng_state"].tolist() == [1]


def test_another_checkpoint_has_another_identity(directory: Path, tmp_path: Path) -> None:
    identity = open_checkpoint(directory).metadata.identity
    assert open_checkpoint(directory).metadata.identity == identity
    (directory / payload(0)).unlink()
    handmade.write_head(directory, [handmade.make_rank(directory, 0)])
    assert open_checkpoint(directory).metadata.identity != identity


def test_payload_is_read_without_unpickling(directory: Path) -> None:
    """Bare elements, without any record around them, are read as well."""
    raw = bytes(TENSORS[BIAS].view(torch.uint8).tolist())
    (directory / payload(1)).write_bytes(raw)
    (directory / payload(0)).write_bytes(raw)

    def bare(part: handmade.Part) -> None:
        part["ranks"][1].update(size=24)
        handmade.rows_of(part, BIAS)[0].update(offset=0, length=24, lead=0, checksum=index_bytes.hashed(raw))

    handmade.edit_group(directory, bare)
    assert torch.equal(assemble(open_checkpoint(directory), BIAS), TENSORS[BIAS])


def flip(path: Any, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Any) -> None:
    elsewhere = path.with_name(f"moved-{path.name}")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [Path.unlink, truncate, extend, link, empty, replace_by_directory]


@pytest.fixture
def no_payload_read(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OpenFiles.read

    def read(self: OpenFiles, path: Any, *rest: Any) -> Any:
        assert path.name.endswith(".index"), "payload was read"
        return original(self, path, *rest)

    monkeypatch.setattr(OpenFiles, "read", read)


@pytest.mark.usefixtures("no_payload_read")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_payload_file_is_named_before_any_payload_is_read(
    directory: Path, damage: Callable[[Path], Any]
) -> None:
    damage(directory / payload(1))
    source = open_checkpoint(directory)
    with pytest.raises(DamagedCheckpointError) as caught:
        source.chunks([WEIGHT])
    assert caught.value.key == str(directory / payload(1))


ANY_DAMAGE = [*DAMAGES, lambda path: flip(path, 5), lambda path: flip(path, 500), lambda path: flip(path, -5)]


@pytest.mark.parametrize("damage", ANY_DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_index_of_a_group_is_named_before_any_chunk_is(
    directory: Path, damage: Callable[[Path], Any]
) -> None:
    damage(directory / GROUP)
    source = open_checkpoint(directory)
    with pytest.raises((DamagedCheckpointError, ManifestError)) as caught:
        source.chunks(list(KEYS))
    assert caught.value.key == str(directory / GROUP)


@pytest.mark.parametrize("damage", ANY_DAMAGE, ids=lambda damage: damage.__name__)
def test_a_ranks_own_damaged_index_is_named_where_it_is_read(directory: Path, damage: Callable[[Path], Any]) -> None:
    damage(directory / index(1))
    source = open_checkpoint(directory)
    assert source.chunks(list(KEYS)).keys() == KEYS.keys(), "a group's index has them all"
    with pytest.raises((DamagedCheckpointError, ManifestError)) as caught:
        list(source.ranks())
    assert caught.value.key == str(directory / index(1))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read from now on."""
    read: list[str] = []
    original = OpenFiles.read

    def note(self: OpenFiles, path: Any, *rest: Any) -> Any:
        read.append(path.name)
        return original(self, path, *rest)

    monkeypatch.setattr(OpenFiles, "read", note)
    return read


def test_the_same_layout_reads_its_ranks_own_index_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = noted(monkeypatch)
    source = open_checkpoint(directory, near=[0])
    chunks = source.chunks([WEIGHT, AVERAGE, STEP], {WEIGHT: [UPPER], AVERAGE: [UPPER], STEP: [Box((), ())]})
    assert {key: [chunk.box for chunk in found] for key, found in chunks.items()} == {
        WEIGHT: [UPPER],
        AVERAGE: [UPPER],
        STEP: [Box((), ())],
    }
    assert [source.metadata.keys[key] for key in chunks] == [KEYS[key] for key in chunks]
    assert source.hyperparameters([NAME]) == {NAME: HYPERPARAMETERS}
    assert source.stateless(["module.module.frozen0"]) == {"module.module.frozen0"}
    exact, near = source.near({"rank": 0, "pipeline": 0, "tensor": 0})
    assert exact == near
    assert exact is not None
    assert exact.coordinates["rank"] == 0
    assert set(read) == {index(0)}


def test_ranks_with_copies_read_what_the_others_wrote(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's index has all slots of the parameter and rows of its part, the first rank's has the rest."""
    read = noted(monkeypatch)
    source = open_checkpoint(directory, near=[1, 0])
    assert source.slots(NAME).keys() == {"exp_avg", "step"}
    assert source.hyperparameters([NAME]) == {NAME: HYPERPARAMETERS}
    assert set(read) == {index(1)}
    found = source.chunks([BIAS, STEP, AVERAGE], {BIAS: [Box((0,), (3,))], STEP: [Box((), ())], AVERAGE: [UPPER]})
    assert {key: [chunk.box for chunk in chunks] for key, chunks in found.items()} == {
        BIAS: [Box((0,), (3,))],
        STEP: [Box((), ())],
        AVERAGE: [UPPER],
    }
    assert set(read) == {index(1), index(0)}


@pytest.mark.parametrize("near", [[], [0], [1], [2], [7], [1, 0], [7, 1]])
def test_another_layout_reads_the_rest_from_the_groups(directory: Path, near: list[int]) -> None:
    """What is needed of a key, wherever it lies and whoever asks."""
    source = open_checkpoint(directory, near)
    whole = {key: [Box((0,) * tensor.dim(), tuple(tensor.shape))] for key, tensor in TENSORS.items()}
    chunks = source.chunks(list(KEYS), whole)
    assert {
        key: sorted((chunk.box for chunk in found), key=lambda box: box.offset) for key, found in chunks.items()
    } == {
        WEIGHT: [UPPER, LOWER],
        AVERAGE: [UPPER, LOWER],
        STEP: [Box((), ())],
        BIAS: [Box((0,), (3,))],
    }
    assert source.stateless([f"module.module.frozen{n}" for n in range(3)]) == {
        f"module.module.frozen{n}" for n in range(2)
    }
    lower = source.chunks([WEIGHT], {WEIGHT: [Box((2, 1), (1, 1))]})
    assert [chunk.box for chunk in lower[WEIGHT]] == [LOWER]


def test_the_record_at_a_place_is_that_of_the_rank_that_saved_there(directory: Path) -> None:
    source = open_checkpoint(directory)
    exact, near = source.near({"rank": 1, "pipeline": 0, "tensor": 1})
    assert exact is not None
    assert exact.coordinates["rank"] == 1
    assert near == exact
    exact, near = source.near({"rank": 5, "pipeline": 0, "tensor": 1})
    assert (exact, near is not None and near.coordinates["rank"]) == (None, 1)
    assert source.near({"rank": 0, "pipeline": 1, "tensor": 0}) == (None, None)


def test_keys_are_shared_out_each_once(directory: Path) -> None:
    source = open_checkpoint(directory)
    for count in (1, 2, 3):
        shares = [key for number in range(count) for key in source.share(number, count)]
        assert sorted(shares) == sorted(KEYS)


@pytest.mark.parametrize("said", [3, 5])
def test_as_many_keys_as_the_index_does_not_have_are_named(directory: Path, said: int) -> None:
    metadata = read_manifest(directory)
    handmade.write_manifest(directory / "manifest.json", metadata.model_copy(update={"keys": said}))
    with pytest.raises(ManifestError) as caught:
        list(open_checkpoint(directory).metadata.keys)
    assert (caught.value.expected, caught.value.found) == ("as many keys as the index has, 4", f"{said}")
    assert caught.value.key == str(directory / "manifest.json")


def test_hyperparameters_that_the_head_has_not_are_named(directory: Path) -> None:
    handmade.edit_group(directory, lambda part: part["names"][0].update(value=5))
    with pytest.raises(ManifestError, match="hyperparameters 0000000000000005") as caught:
        open_checkpoint(directory).hyperparameters([NAME])
    assert caught.value.key == str(directory / "manifest.json")


NO_MAPPINGS = [{"$tuple": [1]}, {"$tuple": []}, {"$dict": [[1, 2]]}, {"$float": "inf"}]


@pytest.mark.parametrize("value", NO_MAPPINGS, ids=json.dumps)
def test_hyperparameters_of_another_type_are_refused(directory: Path, value: Any) -> None:
    metadata = read_manifest(directory)
    known = dict.fromkeys(metadata.hyperparameters, value)
    handmade.write_manifest(directory / "manifest.json", metadata.model_copy(update={"hyperparameters": known}))
    with pytest.raises(ManifestError, match="a mapping by names"):
        open_checkpoint(directory).hyperparameters([NAME])


@pytest.mark.parametrize("value", [*NO_MAPPINGS, [], "x", None], ids=json.dumps)
def test_values_of_another_type_are_refused(directory: Path, value: Any) -> None:
    metadata = read_manifest(directory)
    handmade.write_manifest(directory / "manifest.json", metadata.model_copy(update={"values": value}))
    with pytest.raises(ManifestError, match="a mapping by names"):
        open_checkpoint(directory)


@pytest.mark.parametrize("value", [*NO_MAPPINGS, [], "x", 0], ids=json.dumps)
@pytest.mark.parametrize("field", ["values", "extra_state"])
def test_a_ranks_values_of_another_type_are_refused(directory: Path, field: str, value: Any) -> None:
    handmade.edit(directory, 1, lambda part: part.update(record=json.dumps({field: value}).encode()))
    with pytest.raises(ManifestError, match="a mapping by names"):
        list(open_checkpoint(directory).ranks())


def test_an_own_index_of_another_rank_is_refused(directory: Path) -> None:
    (directory / index(0)).write_bytes((directory / index(1)).read_bytes())
    with pytest.raises(ManifestError, match="the index file of rank 0"):
        open_checkpoint(directory, near=[0]).chunks([WEIGHT], {WEIGHT: [UPPER]})


def test_files_that_are_not_needed_are_not_asked_for(directory: Path) -> None:
    (directory / payload(1)).unlink()
    assert torch.equal(assemble(open_checkpoint(directory), STEP), TENSORS[STEP])


def test_every_flipped_byte_of_a_record_is_seen(directory: Path) -> None:
    source = open_checkpoint(directory)
    [chunk] = source.chunks([BIAS])[BIAS]
    for byte in range(chunk.record.length):
        flip(chunk.path, chunk.record.offset + byte)
        for read in (source.read, partial(source.read_part, place=NOWHERE, scratch=Scratch())):
            with pytest.raises(DamagedCheckpointError) as caught:
                read(chunk)
            assert caught.value.key == str(directory / payload(1))
            assert BIAS in caught.value.expected
        flip(chunk.path, chunk.record.offset + byte)
    assert torch.equal(source.read(chunk), TENSORS[BIAS])


def test_a_payload_file_that_shrinks_after_it_was_checked_is_named(directory: Path) -> None:
    source = open_checkpoint(directory)
    [chunk] = source.chunks([BIAS])[BIAS]
    chunk.path.write_bytes(chunk.path.read_bytes()[: chunk.record.offset + 3])
    with pytest.raises(DamagedCheckpointError, match="3 bytes") as caught:
        source.read(chunk)
    assert caught.value.key == str(chunk.path)


def test_a_payload_file_that_becomes_a_link_after_it_was_checked_is_not_followed(directory: Path) -> None:
    source = open_checkpoint(directory)
    [chunk] = source.chunks([BIAS])[BIAS]
    link(chunk.path)
    with pytest.raises(OSError, match="symbolic links"):
        source.read(chunk)


@pytest.mark.parametrize("position", [5, 200, -30])
def test_an_edited_manifest_is_refused(directory: Path, position: int) -> None:
    flip(directory / "manifest.json", position)
    with pytest.raises(ManifestError) as caught:
        open_checkpoint(directory)
    assert caught.value.key == str(directory / "manifest.json")


def test_an_edited_value_in_a_manifest_is_refused(directory: Path) -> None:
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    body["values"]["iteration"] = 11
    path.write_text(json.dumps(body))
    with pytest.raises(ManifestError, match="its own checksum"):
        open_checkpoint(directory)


def test_a_row_outside_its_key_is_refused_before_payload_is_read(directory: Path) -> None:
    handmade.edit_group(directory, lambda part: handmade.rows_of(part, WEIGHT)[1].update(start=[3, 0]))
    with pytest.raises(ManifestError, match="boxes inside shape"):
        open_checkpoint(directory).chunks([WEIGHT])


def test_what_is_no_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    for path, found in [(tmp_path, "an empty directory"), (tmp_path / "absent", "no such directory")]:
        with pytest.raises(NotACheckpointError, match=found) as caught:
            open_checkpoint(path)
        assert caught.value.key == str(path)
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(NotACheckpointError, match=r"weights\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotACheckpointError, match="a file"):
        open_checkpoint(tmp_path / "weights.safetensors")


def test_what_works_on_one_format_names_the_other(directory: Path, tmp_path: Path) -> None:
    stock = storage_made.save_stock(tmp_path / "stock")
    with pytest.raises(ConfigurationError, match=r"format fsdp_dtensor; .*format fsdp_dtensor_safe\. Try it so"):
        open_stock(directory, remedy="Try it so.")
    with pytest.raises(ConfigurationError, match=r"format fsdp_dtensor_safe; .*format fsdp_dtensor\. Try it so"):
        open_safe(stock, remedy="Try it so.")
    assert open_safe(directory, remedy="").metadata.format == "fsdp_dtensor_safe"

"""Reading a checkpoint made by hand, whole and damaged: what is wrong is named before payload is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, ManifestError, NotACheckpointError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.storage.checksums import checksum
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.files import file_checksum
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.format.schema import TableEntry, TableHeader
from mbridge_fsdp_ckpt.storage.format.table import Chunk, read_table_header, table_bytes
from mbridge_fsdp_ckpt.storage.opening import open_checkpoint, open_safe, open_stock
from mbridge_fsdp_ckpt.storage.ranges import ByteRange
from mbridge_fsdp_ckpt.storage.source import CheckpointSource
from tests.unit import handmade
from tests.unit.handmade import BIAS, HYPERPARAMETERS, KEYS, NAME, STEP, TENSORS, VALUES, WEIGHT, payload, table


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.make(tmp_path / "iter_0000010")


def assemble(source: CheckpointSource, key: str) -> torch.Tensor:
    """A whole tensor from its chunks."""
    whole = torch.full(source.head.keys[key].shape, 99).to(getattr(torch, source.head.keys[key].dtype))
    for chunk in source.chunks([key])[key]:
        whole[tuple(slice(o, o + s) for o, s in zip(chunk.box.offset, chunk.box.size, strict=True))] = source.read(
            chunk
        )
    return whole


def test_the_head_is_open_to_all(directory: Path) -> None:
    source = open_checkpoint(directory)
    assert isinstance(source, SafeSource)
    assert source.head.keys == KEYS
    assert source.head.values == VALUES
    assert (source.head.sections, source.head.topology) == (("model", "optimizer"), {"world": 2, "tensor": 2})
    assert [r.stateless for r in source.ranks()] == [("module.module.frozen0",), ("module.module.frozen1",)]


@pytest.mark.parametrize("key", KEYS)
def test_every_tensor_is_read_back(directory: Path, key: str) -> None:
    found = assemble(open_checkpoint(directory), key)
    assert found.dtype == TENSORS[key].dtype
    assert torch.equal(found, TENSORS[key])


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
    identity = open_checkpoint(directory).head.identity
    assert open_checkpoint(directory).head.identity == identity
    (directory / payload(0)).unlink()
    (directory / table(0)).unlink()
    handmade.write_head(directory, [handmade.make_rank(directory, 0)])
    assert open_checkpoint(directory).head.identity != identity


def test_payload_is_read_without_unpickling(directory: Path) -> None:
    """Bare elements, without any record around them, are read as well."""
    raw = bytes(TENSORS[BIAS].view(torch.uint8).tolist())
    (directory / "bare").write_bytes(raw)
    chunk = Chunk(BIAS, 0, ByteRange(0, 24), Box((0,), (3,)), checksum(raw), ByteRange(0, 24))
    header = TableHeader(
        rank=0, coordinates={}, files=(FileEntry(name="bare", size=24, checksum=checksum(raw)),), keys={}, chunks=1
    )
    path = directory / "bare.jsonl"
    path.write_bytes(table_bytes(header, [chunk]))
    entry = TableEntry(name=path.name, size=path.stat().st_size, checksum=file_checksum(path), rank=0)
    handmade.write_head(directory, [entry])
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
    monkeypatch.setattr(os, "preadv", lambda *arguments: pytest.fail("payload was read"))


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


@pytest.mark.usefixtures("no_payload_read")
@pytest.mark.parametrize(
    "damage", [*DAMAGES, lambda path: flip(path, 5), lambda path: flip(path, -5)], ids=lambda damage: damage.__name__
)
def test_a_damaged_table_is_named_on_opening(directory: Path, damage: Callable[[Path], Any]) -> None:
    damage(directory / table(1))
    with pytest.raises(DamagedCheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.value.key == str(directory / table(1))


def test_files_that_are_not_needed_are_not_asked_for(directory: Path) -> None:
    (directory / payload(1)).unlink()
    assert torch.equal(assemble(open_checkpoint(directory), STEP), TENSORS[STEP])


def test_every_flipped_byte_of_a_record_is_seen(directory: Path) -> None:
    source = open_checkpoint(directory)
    [chunk] = source.chunks([BIAS])[BIAS]
    for byte in range(chunk.record.length):
        flip(chunk.path, chunk.record.offset + byte)
        with pytest.raises(DamagedCheckpointError) as caught:
            source.read(chunk)
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


def test_a_table_of_other_keys_than_the_manifest_is_refused(directory: Path) -> None:
    path = directory / table(0)
    header = read_table_header(path)
    alien = Chunk("alien", 0, ByteRange(0, 1), Box((), ()), "", ByteRange(0, 1))
    path.write_bytes(table_bytes(header.model_copy(update={"chunks": 1}), [alien]))
    entry = TableEntry(name=path.name, size=path.stat().st_size, checksum=file_checksum(path), rank=0)
    handmade.write_head(directory, [entry])
    with pytest.raises(ManifestError, match="'alien'"):
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
    stock = tmp_path / "stock"
    stock.mkdir()
    (stock / ".metadata").touch()
    with pytest.raises(ConfigurationError, match=r"format fsdp_dtensor; .*format fsdp_dtensor_safe\. Try it so"):
        open_stock(directory, remedy="Try it so.")
    with pytest.raises(ConfigurationError, match=r"format fsdp_dtensor_safe; .*format fsdp_dtensor\. Try it so"):
        open_safe(stock, remedy="Try it so.")
    assert open_safe(directory, remedy="").head.format == "fsdp_dtensor_safe"

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A stock checkpoint is data from anywhere: nothing in it runs, leaves the directory, or ends in a nameless error."""

import pickle
import signal
import warnings
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.opening import open_checkpoint

KEY = "model.weight"


class Creates:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(6)}, "iteration": 10})


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that exists if foreign code ran."""
    return tmp_path / "code ran"


def write(directory: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def read_all(directory: Path) -> None:
    """Everything that a load would read."""
    source = open_checkpoint(directory)
    for chunks in source.chunks(source.metadata.keys).values():
        for chunk in chunks:
            source.read(chunk)
    source.hyperparameters(["weight"])
    list(source.ranks())


def rewrite(directory: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata and pickle it again."""
    path = directory / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_the_attack_would_work_without_protection(directory: Path, proof: Path) -> None:
    rewrite(directory, lambda found: setattr(found, "planner_data", Creates(proof)))
    pickle.loads((directory / ".metadata").read_bytes()).planner_data.close()
    assert proof.exists()


@pytest.mark.parametrize(
    "place", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "unheard_of"]
)
def test_code_in_the_metadata_does_not_run(directory: Path, proof: Path, place: str) -> None:
    rewrite(directory, lambda found: setattr(found, place, Creates(proof)))
    with pytest.raises(ManifestError, match=r"open is not DCP metadata") as caught:
        open_checkpoint(directory)
    assert caught.value.key == str(directory / ".metadata")
    assert not proof.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("posix", "system"),
        ("io", "open"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.serialization", "load"),
        ("pathlib", "Path.write_text"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "namedtuple"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("mbridge_fsdp_ckpt.io.dcp_metadata", "pickle.loads"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 4])
def test_only_metadata_classes_have_a_name(directory: Path, module: str, name: str, protocol: int) -> None:
    texts = [bytes([0x8C, len(text)]) + text.encode() for text in (module, name)]
    old, new = f"c{module}\n{name}\n.".encode(), b"\x80\x04" + texts[0] + texts[1] + b"\x93."
    (directory / ".metadata").write_bytes(new if protocol else old)
    with pytest.raises(ManifestError, match="is not DCP metadata"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("victim", "holder"),
    [
        ("torch.distributed.checkpoint.metadata\nMetadata", metadata.Metadata),
        ("torch.distributed.checkpoint.metadata\nMetadataIndex", metadata.MetadataIndex),
        ("torch.distributed.checkpoint.filesystem\n_StorageInfo", _StorageInfo),
        ("torch.serialization\n_get_layout", torch.serialization._get_layout),
    ],
)
def test_the_classes_themselves_cannot_be_changed(directory: Path, victim: str, holder: Any) -> None:
    """The BUILD instruction sets attributes of whatever lies on the stack, a class of torch for one."""
    (directory / ".metadata").write_bytes(f"c{victim}\n(N(Vpoisoned\nI1\ndtb.".encode())
    try:
        with pytest.raises(ManifestError):
            open_checkpoint(directory)
        assert not hasattr(holder, "poisoned")
    finally:
        if hasattr(holder, "poisoned"):
            del holder.poisoned


@pytest.mark.parametrize("record", ["iteration", "rng_state", "optimizer"])
def test_code_in_a_byte_object_does_not_run(tmp_path: Path, proof: Path, record: str) -> None:
    state: dict[str, Any] = {"model": {"weight": torch.ones(6)}, "iteration": 10}
    evil: Any = Creates(proof)
    state |= {
        "iteration": {"iteration": evil},
        "rng_state": {"rng_state": {"(0, 0)": [evil]}},
        "optimizer": {"optimizer": {"param_to_group_meta": {"weight": {"lr": evil}}}},
    }[record]
    directory = write(tmp_path / "iter_0000010", state)
    with pytest.raises(DamagedCheckpointError) as caught:
        read_all(directory)
    assert caught.value.key
    assert Path(caught.value.key).suffix == ".distcp"
    assert not proof.exists()


def test_what_is_no_namespace_of_arguments_says_nothing_and_does_not_run(tmp_path: Path, proof: Path) -> None:
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(6)}, "args": Creates(proof)})
    assert open_checkpoint(directory).metadata.values == {"args": {}}
    assert not proof.exists()


def test_of_megatron_lms_arguments_numbers_and_text_are_read_and_nothing_runs(tmp_path: Path, proof: Path) -> None:
    numbers = {"consumed_train_samples": 16, "skipped_train_samples": 4, "tokenizer_type": "NullTokenizer"}
    others: dict[str, Any] = {
        "num_layers": Creates(proof),
        "hidden_size": [Creates(proof)],
        "params_dtype": torch.bfloat16,
        "exit_signal": signal.SIGTERM,
        "spec": OrderedDict(a={1}, b=defaultdict(list, c=[1])),
        "weights": torch.ones(2),
        "seed": 7,
    }
    state = {"model": {"weight": torch.ones(6)}, "args": Namespace(**numbers, **others)}
    assert open_checkpoint(write(tmp_path / "iter_0000010", state)).metadata.values == {"args": numbers}
    assert not proof.exists()


def test_code_in_a_tensor_record_does_not_run(directory: Path, proof: Path) -> None:
    torch.save(Creates(proof), directory / "evil.distcp")
    size = (directory / "evil.distcp").stat().st_size
    place = metadata.MetadataIndex(KEY, torch.Size([0]))
    rewrite(directory, lambda found: found.storage_data.update({place: _StorageInfo("evil.distcp", 0, size)}))
    with pytest.raises(DamagedCheckpointError) as caught:
        read_all(directory)
    assert caught.value.key == str(directory / "evil.distcp")
    assert not proof.exists()


def test_choices_that_stock_pickled_as_classes_are_left_out_unread(tmp_path: Path, proof: Path) -> None:
    groups = {"param_to_group_meta": {"weight": {"lr": 0.1, "optimizer_cls": Creates(proof)}}}
    directory = write(tmp_path / "iter_0000010", {"model": {"weight": torch.ones(2)}, "optimizer": groups})
    assert open_checkpoint(directory).hyperparameters(["weight"]) == {"weight": {"lr": 0.1}}
    assert not proof.exists()


def place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of where the weight lies."""
    return lambda found: change(found.storage_data[metadata.MetadataIndex(KEY, torch.Size([0]))])


def renamed(name: Any) -> Callable[[Any], Any]:
    return place(lambda info: setattr(info, "relative_path", name))


@pytest.mark.parametrize("name", ["../x", "sub/x", "", ".", "..", "a\\b", "a\0b"], ids=repr)
def test_a_file_outside_the_directory_is_refused(directory: Path, name: Any) -> None:
    data = next(directory.glob("*.distcp")).read_bytes()
    (directory / "sub").mkdir()
    for target in (directory.parent / "x", directory / "sub" / "x"):
        target.write_bytes(data)
    rewrite(directory, renamed(name))
    with pytest.raises(ManifestError, match="inside the"):
        read_all(directory)


@pytest.mark.parametrize("name", [5, None, ["x"], b"x"], ids=repr)
def test_a_file_name_that_is_no_text_is_refused(directory: Path, name: Any) -> None:
    rewrite(directory, renamed(name))
    with pytest.raises(ManifestError):
        read_all(directory)


def test_an_absolute_path_is_refused(directory: Path) -> None:
    rewrite(directory, renamed(str(next(directory.glob("*.distcp")))))
    with pytest.raises(ManifestError, match="inside the"):
        read_all(directory)


@pytest.mark.parametrize("name", ["linked", "absent", "directory"])
def test_a_file_that_is_none_is_refused(directory: Path, name: str) -> None:
    (directory / "linked").symlink_to(next(directory.glob("*.distcp")))
    (directory / "directory").mkdir()
    rewrite(directory, renamed(name))
    with pytest.raises(DamagedCheckpointError) as caught:
        read_all(directory)
    assert caught.value.key == str(directory / name)


@pytest.mark.parametrize(
    "change",
    [
        place(lambda info: setattr(info, "offset", -1)),
        place(lambda info: setattr(info, "offset", 1 << 62)),
        place(lambda info: setattr(info, "offset", True)),
        place(lambda info: setattr(info, "offset", 0.0)),
        place(lambda info: setattr(info, "offset", None)),
        place(lambda info: setattr(info, "length", -1)),
        place(lambda info: setattr(info, "length", 1 << 62)),
        place(lambda info: setattr(info, "length", "5")),
        place(lambda info: setattr(info, "transform_descriptors", ["zstd"])),
        place(lambda info: info.__dict__.clear()),
        lambda found: found.storage_data.clear(),
        lambda found: found.storage_data.update({metadata.MetadataIndex(KEY, torch.Size([0])): 5}),
        lambda found: setattr(found, "storage_data", [1]),
        lambda found: setattr(found, "storage_data", None),
        lambda found: setattr(found, "planner_data", [1]),
        lambda found: setattr(found, "planner_data", {"iteration": 5}),
        lambda found: setattr(found, "planner_data", {"iteration": ("iteration", 10**15)}),
        lambda found: setattr(found, "planner_data", {"iteration": ("iteration", -5)}),
        lambda found: setattr(found, "planner_data", {"iteration": ("iteration", ["x"])}),
        lambda found: setattr(found, "state_dict_metadata", None),
        lambda found: setattr(found, "state_dict_metadata", {5: found.state_dict_metadata[KEY]}),
        lambda found: found.__dict__.pop("state_dict_metadata"),
        lambda found: found.state_dict_metadata[KEY].__dict__.pop("properties"),
        lambda found: found.state_dict_metadata[KEY].__dict__.pop("chunks"),
        lambda found: found.state_dict_metadata[KEY].__dict__.update(size=None),
        lambda found: found.state_dict_metadata[KEY].__dict__.update(size=(-1,)),
        lambda found: found.state_dict_metadata[KEY].__dict__.update(size=("x",)),
        lambda found: found.state_dict_metadata[KEY].__dict__.update(size=(5,)),
        lambda found: found.state_dict_metadata[KEY].__dict__.update(chunks=[5]),
        lambda found: found.state_dict_metadata[KEY].chunks[0].__dict__.update(sizes=(7,)),
        lambda found: found.state_dict_metadata[KEY].chunks[0].__dict__.update(sizes=(6, 1)),
        lambda found: found.state_dict_metadata[KEY].chunks[0].__dict__.update(offsets=(-1,)),
        lambda found: found.state_dict_metadata[KEY].properties.__dict__.update(dtype=5),
    ],
)
def test_metadata_that_contradicts_itself_ends_in_a_named_error(directory: Path, change: Callable[[Any], Any]) -> None:
    rewrite(directory, change)
    with pytest.raises(CheckpointError):
        read_all(directory)

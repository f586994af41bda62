# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a client of a store raises is one of our errors, on every way to the store, and one line for the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mbridge_fsdp_ckpt.commit import marker, methods, removal
from mbridge_fsdp_ckpt.commit.retention import reading, remove_unless_kept
from mbridge_fsdp_ckpt.commit.target import check_replaceable, obstacle
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, StoreClientError, describe_unexpected
from mbridge_fsdp_ckpt.io.store import as_path, store_of
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools import repair
from mbridge_fsdp_ckpt.tools.audit import Audit
from mbridge_fsdp_ckpt.tools.command.app import application
from mbridge_fsdp_ckpt.tools.repair import plan_repair
from tests.golden import archive
from tests.unit.shards import shards
from tests.unit.test_saving import prepared, save


class ConnectionLostError(Exception):
    """As botocore's: no OSError."""


def cut(monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
    """Calls of these names fail once a manifest of iteration 20 is there."""
    client: Any = import_module("fsspec.implementations.memory").MemoryFileSystem

    def failing(stock: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any("0000020/manifest.json" in place for place in client.store):
                raise ConnectionLostError("Could not connect to the endpoint URL")
            return stock(self, *args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(client, name, failing(getattr(client, name)))


@pytest.fixture(autouse=True)
def _empty() -> None:
    import_module("fsspec.implementations.memory").MemoryFileSystem.store.clear()


def test_a_lost_connection_after_the_commit_fails_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    cut(monkeypatch, "rm_file", "find", "ls")
    target: Any = as_path("memory://bucket/run/iter_0000020")
    save(target, [prepared(shards(0, 12))], Settings(), lambda: followed.append("tracker"))
    assert followed == ["tracker"]


def test_a_lost_connection_fails_no_reader_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    root = as_path("memory://bucket/other")
    store_of(root / "iter_0000020" / "manifest.json").replace(b"{}")
    with reading(root / "iter_0000020") as alive:
        cut(monkeypatch, "rm_file", "open", "info", "find", "cat_file")
        alive()
    place = root / "iter_0000020" / "manifest.json"
    for call in (store_of(place).remove, place.stat, place.read_bytes, lambda: list(store_of(root).below())):
        with pytest.raises(StoreClientError, match="ConnectionLostError: Could not connect") as raised:
            call()
        assert isinstance(raised.value, OSError)


def test_no_answer_is_never_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at metadata and takes a bad one for damaged, or for none, must not take silence for that."""
    target: Any = as_path("memory://bucket/silent/iter_0000020")
    save(target, [prepared(shards(0, 12))])
    stock = as_path("memory://bucket/stock")
    store_of(stock / ".metadata").replace(b"a pickle of somebody's")
    audit = Audit(target, workers=1)
    looks: dict[str, Callable[[], object]] = {
        "why a load would refuse it": lambda: repair.unreadable(target),
        "its train state": lambda: repair._train_state(target),
        "its audit": lambda: list(audit.findings()),
        "what a removal takes": lambda: marker.remove(target, lambda _: True),
        "copies that a save replaces": lambda: marker._copies(target),
        "what a save replaces": lambda: check_replaceable(stock),
    }
    cut(monkeypatch, "open", "cat_file")
    for name, look in looks.items():
        with pytest.raises(StoreClientError, match="Could not connect") as raised:
            print(name, look())  # what it took silence for
        assert not isinstance(raised.value, CheckpointError), "what catches damage would catch this"
        named = describe_unexpected(raised.value, rank=None, doing="looking")
        assert type(named).__name__ == "StorageError"
        assert "Check credentials, endpoint and network" in str(named)


URL = ["inspect URL", "verify URL", "diff URL URL", "families URL", "timeline URL", "prune URL --keep 1", "repair URL"]
URL += ["convert from-stock URL /nowhere", "convert to-stock URL /nowhere", "convert reshard URL /nowhere --ranks 1"]


@pytest.mark.parametrize("words", URL)
def test_the_command_says_in_one_line_what_a_client_says(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(as_path("memory://bucket/iter_0000020/manifest.json")).replace(b"{}")
    cut(monkeypatch, "info", "exists", "isdir", "isfile")
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    cases = {
        "memory://bucket/run": "StorageError",
        "nosuch://bucket/run": "ConfigurationError",
        "msc://unknown/run": "StorageError",
    }
    for url, error in cases.items():
        result = CliRunner().invoke(application(), words.replace("URL", url).split())
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.stderr.startswith(f"{error}: ")
        assert len(result.stderr.splitlines()) == 1


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Objects of this name cannot be read."""
    client: Any = import_module("fsspec.implementations.memory").MemoryFileSystem
    original = client._open

    def opened(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(name):
            raise ConnectionLostError("Could not connect to the endpoint URL")
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(client, "_open", opened)


def objects() -> set[str]:
    return set(import_module("fsspec.implementations.memory").MemoryFileSystem.store)


@pytest.mark.parametrize("remove", [methods.remove, remove_unless_kept])
def test_a_head_that_is_not_told_is_no_damaged_head_of_a_removal(
    remove: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is damaged nobody knows which objects are its own."""
    target: Any = as_path("memory://bucket/run/iter_0000010")
    save(target, [prepared(shards(0, 12))], Settings())
    store_of(target / "__0_0-0123456789ab.distcp").replace(b"of a save that goes on")
    before = objects()
    refuse(monkeypatch, "/manifest.json")
    with pytest.raises(StoreClientError):
        remove(target)
    assert objects() == before


def test_a_head_that_is_not_told_is_no_damaged_head_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own checkpoint of torch's is told by its metadata alone; and so are files that a save before added."""
    torch.distributed.checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    target: Any = as_path("memory://bucket/run/iter_0000010")
    for path in (tmp_path / "dcp").iterdir():
        store_of(target / path.name).replace(path.read_bytes())
    assert obstacle(target) is not None
    ours: Any = as_path("memory://bucket/run/iter_0000020")
    save(ours, [prepared(shards(0, 12))], Settings())
    before = objects()
    refuse(monkeypatch, "/.metadata")
    with pytest.raises(StoreClientError):
        check_replaceable(target)
    refuse(monkeypatch, "/manifest.json")
    with pytest.raises(StoreClientError):
        save(ours, [prepared(shards(0, 12))], Settings())
    assert removal.wait(30.0)
    assert objects() == before


@pytest.mark.parametrize("name", ["/manifest.json", ".index", "/.metadata"])
def test_a_checkpoint_that_is_not_told_is_no_damaged_one_of_a_repair(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would let the trackers name an older one."""
    root: Any = as_path("memory://bucket/run")
    for number in (10, 20):
        save(root / f"iter_{number:07d}", [prepared(shards(0, 12))], Settings(dcp_metadata="always"))
    if name == "/.metadata":
        archive.unpack(Path(archive.__file__).parent / "stock-0.19" / "torch_adam_1_rank.tar.xz", tmp_path / "stock")
        for path in (tmp_path / "stock").iterdir():
            store_of(root / "iter_0000030" / path.name).replace(path.read_bytes())
    assert len(plan_repair(root, force=False).steps) == 1
    refuse(monkeypatch, name)
    with pytest.raises(StoreClientError):
        plan_repair(root, force=False)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nosuch"):
        as_path("nosuch://bucket/run")

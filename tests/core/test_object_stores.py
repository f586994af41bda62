# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checkpoints in object stores: the S3 protocol, through fsspec and through Multi-Storage Client, on real ranks."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner
from upath import UPath

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.commit import lease, methods, removal
from mbridge_fsdp_ckpt.commit.retention import being_read, iterations, prune, reading
from mbridge_fsdp_ckpt.commit.target import check_replaceable
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError, StoreClientError
from mbridge_fsdp_ckpt.io.files import entries, everything_in
from mbridge_fsdp_ckpt.io.store import as_path, store_of
from mbridge_fsdp_ckpt.tools.command.app import application
from mbridge_fsdp_ckpt.tools.repair import plan_repair
from testing.models import Recipe
from testing.ranks import RankPool
from tests.core import cases, oracle
from tests.soak import sampling
from tests.soak.disk import Fault, holding
from tests.unit import handmade

RECIPE = Recipe(layers=1)
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server of this machine, and what clients need to find it."""
    moto = pytest.importorskip("moto.server", reason="needs moto's S3 server")
    for package in ("s3fs", "multistorageclient"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    folder = tmp_path_factory.mktemp("store")
    options = {"base_path": BUCKET, "region_name": "us-east-1", "endpoint_url": endpoint}
    profile = {"storage_provider": {"type": "s3", "options": options}}
    (folder / "msc.json").write_text(json.dumps({"profiles": {"run": profile, "disk": _on_disk(folder)}}))
    found = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "MSC_CONFIG": str(folder / "msc.json"),
        "NO_PROXY": "127.0.0.1",
    }
    before = dict(os.environ)
    os.environ.update(found)
    file_systems: Any = importlib.import_module("s3fs").S3FileSystem
    file_systems.clear_instance_cache()  # of an earlier server
    try:
        UPath(f"s3://{BUCKET}").mkdir(exist_ok=True)  # moto keeps what an earlier one had
        yield found
    finally:
        file_systems.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def _on_disk(folder: Path) -> dict[str, Any]:
    (folder / "posix").mkdir()
    return {"storage_provider": {"type": "file", "options": {"base_path": str(folder / "posix")}}}


def train_and_save(directory: str, environment: dict[str, str], steps: int, fault: Fault | None = None) -> Any:
    os.environ.update(environment)
    trainable = cases.prepared(RECIPE, steps=steps)
    with holding(fault):
        try:
            mbridge_fsdp_ckpt.save(
                directory, model=trainable.model, optimizer=trainable.optimizer, add_files=_add_a_file
            )
        except CheckpointError as error:
            if fault is None:
                raise
            return str(error)
    return oracle.live(trainable)


def _add_a_file(folder: Path) -> None:
    (folder / "assets").mkdir()
    (folder / "assets" / "vocabulary.txt").write_text("a b c")


def load(directory: str, environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    trainable = cases.prepared(RECIPE, seed=999)
    mbridge_fsdp_ckpt.load(directory, model=trainable.model, optimizer=trainable.optimizer)
    return oracle.live(trainable)


def names(directory: str) -> list[str]:
    return sorted(path.name for path in as_path(directory).iterdir())


def objects(directory: str) -> set[str]:
    """Without folders, of which Multi-Storage Client leaves empty ones on a file system."""
    found = everything_in(as_path(directory))
    return {str(path).removeprefix(f"{directory}/") for path in found if path.is_file()}


ROOTS = [f"s3://{BUCKET}/plain", "msc://run/through-msc", "msc://disk/through-msc"]


@pytest.mark.parametrize("root", sampling.drawn("object stores", ROOTS, share=2))
def test_save_overwrite_and_load(root: str, environment: dict[str, str], megatron_ranks: RankPool) -> None:
    directory = f"{root}/iter_0000001"
    first = megatron_ranks.run(train_and_save, directory, environment, 1, ranks=2)[0]
    assert megatron_ranks.run(load, directory, environment, ranks=2)[0] == first
    before = objects(directory)
    second = megatron_ranks.run(train_and_save, directory, environment, 2, ranks=2)[0]
    assert second != first
    assert megatron_ranks.run(load, directory, environment, ranks=1)[0] == second
    after = objects(directory)
    assert len(after) == len(before), "objects of the older save are gone"
    assert after & before == {"manifest.json", ".metadata", "assets/vocabulary.txt"}, "no other was written over"
    assert (as_path(directory) / "assets" / "vocabulary.txt").read_text() == "a b c"


FAILING = [
    "format.write_results:write_file",
    "commit.marker:replace_file",
    "format.payload:PayloadWriter.close",
]


@pytest.mark.parametrize("call", sampling.drawn("failing objects", FAILING, share=3))
def test_a_save_that_fails_leaves_the_older_one(
    call: str, environment: dict[str, str], megatron_ranks: RankPool
) -> None:
    root = f"s3://{BUCKET}/failing-{call.rpartition(':')[2]}"
    directory = f"{root}/iter_0000001"
    old = megatron_ranks.run(train_and_save, directory, environment, 1, ranks=2)[0]
    before = names(directory)
    fault = Fault(f"mbridge_fsdp_ckpt.{call}", 0, 5)
    texts = megatron_ranks.run(train_and_save, directory, environment, 2, fault, ranks=2)
    assert len(set(texts)) == 1
    assert "Input/output error" in texts[0]
    assert names(directory) == before
    assert megatron_ranks.run(load, directory, environment, ranks=2)[0] == old
    megatron_ranks.run(train_and_save, f"{root}/iter_0000002", environment, 2, fault, ranks=2)
    assert names(root) == ["iter_0000001"]


@pytest.mark.parametrize("call", ["dcp.writer:write_dcp_view", "commit.marker:_objects"])
def test_a_save_that_cannot_tidy_up_is_a_save(call: str, environment: dict[str, str], megatron_ranks: RankPool) -> None:
    directory = f"s3://{BUCKET}/untidy-{call.rpartition(':')[2]}/iter_0000001"
    megatron_ranks.run(train_and_save, directory, environment, 1, ranks=2)
    fault = Fault(f"mbridge_fsdp_ckpt.{call}", 0, 5)
    new = megatron_ranks.run(train_and_save, directory, environment, 2, fault, ranks=2)[0]
    assert not isinstance(new, str), new
    assert megatron_ranks.run(load, directory, environment, ranks=2)[0] == new


def test_what_has_no_manifest_is_no_checkpoint(environment: dict[str, str], megatron_ranks: RankPool) -> None:
    """A save that died before its manifest: ignored by readers, removed by the next save of that directory."""
    root = f"s3://{BUCKET}/dead"
    megatron_ranks.run(train_and_save, f"{root}/iter_0000001", environment, 1, ranks=2)
    for name in ("manifest.json", ".metadata"):
        (as_path(root) / "iter_0000001" / name).unlink()
    [dead] = iterations(as_path(root))
    assert not dead.complete
    with pytest.raises(Exception, match="iter_0000001"):
        megatron_ranks.run(load, f"{root}/iter_0000001", environment, ranks=2)
    assert (
        len(methods.leftovers(as_path(root))) == 7
    )  # three index files, two payloads, the stock view's values, an added file
    megatron_ranks.run(train_and_save, f"{root}/iter_0000002", environment, 1, ranks=2)
    assert len(methods.leftovers(as_path(root))) == 7, "those may belong to another job"
    megatron_ranks.run(train_and_save, f"{root}/iter_0000001", environment, 1, ranks=2)
    assert methods.leftovers(as_path(root)) == []
    assert len(names(f"{root}/iter_0000001")) == len(names(f"{root}/iter_0000002"))


REFUSED = {
    "run/": (["iter_0000001/manifest.json"], "a root of checkpoints, with iter_0000001"),
    "model": (["dist_ckpt/.metadata", "huggingface/config.json"], "a root of checkpoints, with dist_ckpt"),
    "hf": (["config.json", "model.safetensors"], "a Hugging Face model"),
    "torch_dist": (["metadata.json", ".metadata", "__0_0.distcp"], "another format"),
    "sources": (["train.py", "manifest.json"], "with manifest.json, train.py"),
}


@pytest.mark.parametrize(("name", "files", "says"), [(name, *what) for name, what in REFUSED.items()], ids=REFUSED)
def test_what_is_no_checkpoint_is_refused(
    name: str, files: list[str], says: str, environment: dict[str, str], tmp_path: Path
) -> None:
    target = as_path(f"s3://{BUCKET}/refused/{name}")
    for file in files:
        (target / file).write_text(file)
    with pytest.raises(ConfigurationError, match=says):
        check_replaceable(target)


def test_a_folder_made_in_a_browser_and_a_dead_saves_objects_are_replaced(
    environment: dict[str, str], megatron_ranks: RankPool
) -> None:
    """Consoles make an empty object of the folder's name; a save that died may have left the caller's files."""
    directory = f"s3://{BUCKET}/made/iter_0000001"
    UPath(directory).fs.call_s3("put_object", Bucket=BUCKET, Key="made/iter_0000001/", Body=b"")
    check_replaceable(as_path(directory))
    for name in ("__0_0-0123456789ab.distcp", "rank_00000-0123456789ab.index", "assets/vocabulary.txt"):
        (as_path(directory) / name).write_text("of a dead save")
    saved = megatron_ranks.run(train_and_save, f"{directory}/", environment, 1, ranks=2)[0]
    assert megatron_ranks.run(load, directory, environment, ranks=2)[0] == saved
    assert not any("0123456789ab" in name for name in names(directory))


def test_a_save_over_a_root_in_an_object_store_fails_on_all_ranks(
    environment: dict[str, str], megatron_ranks: RankPool
) -> None:
    root = f"s3://{BUCKET}/whole"
    (as_path(root) / "iter_0000001" / "manifest.json").write_text("{}")
    written = Fault("mbridge_fsdp_ckpt.format.write_results:write_file", 0, 5)  # nothing is, so this is not what fails
    texts = megatron_ranks.run(train_and_save, root, environment, 1, written, ranks=2)
    assert len(set(texts)) == 1
    assert "a root of checkpoints" in texts[0]
    assert names(root) == ["iter_0000001"]


def straggle(directory: str, environment: dict[str, str]) -> list[str]:
    """A save that gives a heartbeat with each block: what there is before it commits."""
    os.environ.update(environment)
    trainable, seen = cases.prepared(RECIPE, steps=1), list[str]()
    with patch.object(lease, "STALE_S", 0.0):
        mbridge_fsdp_ckpt.save(
            directory,
            model=trainable.model,
            optimizer=trainable.optimizer,
            add_files=lambda folder: seen.extend(names(directory)),
        )
    assert removal.wait(60.0)
    return seen


def test_finished_objects_stay_while_somebody_writes(environment: dict[str, str], megatron_ranks: RankPool) -> None:
    root = as_path(f"s3://{BUCKET}/straggling")
    seen = megatron_ranks.run(straggle, f"{root}/iter_0000001", environment, ranks=1)[0]
    assert [name for name in seen if name.startswith("__saving-")], "writers renew a lease"
    assert not [name for name in names(f"{root}/iter_0000001") if name.startswith("__saving-")]
    place = root / "iter_0000002"
    for name in ("__0_0-0123456789ab.distcp", "__added-0123456789ab/run_config.yaml"):
        (place / name).write_text("of a rank that was done early")
    backends = importlib.import_module("moto.s3.models").s3_backends["123456789012"]["aws"]
    for name, key in backends.buckets[BUCKET].keys.items():
        if name.startswith("straggling/iter_0000002/"):
            key.last_modified -= timedelta(hours=2)
    assert len(plan_repair(root, force=False).deletes) == 2, "nobody writes there"
    lease.renew(place / "__saving-0123456789ab")
    plan = plan_repair(root, force=False)
    assert plan.deletes == []
    assert len(plan.left_alone) == 3


def test_the_command_names_missing_credentials_and_an_unreachable_host(environment: dict[str, str]) -> None:
    unreachable = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/no"}
    without = {name: value for name, value in os.environ.items() if "ACCESS_KEY" not in name}
    for changed, found in ((os.environ | unreachable, "Could not connect"), (without | nobody, "credentials")):
        words = [sys.executable, "-m", "mbridge_fsdp_ckpt", "verify", f"s3://{BUCKET}/pruned"]
        ended = subprocess.run(words, env=changed, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 1, ended.stderr
        assert found in ended.stderr
        assert "Traceback" not in ended.stderr


DENIED = ["s3:ListBucket on *", "s3:GetObject on iter_000000*", "s3:GetObject on latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(
    ("denied", "client"), [*((denied, f"s3://{BUCKET}") for denied in DENIED), (DENIED[1], "msc://run")]
)
def test_what_is_denied_is_neither_absent_nor_damaged(
    denied: str, client: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks a user's policy; whoever takes 403 for "nothing there" prunes and repairs what is in use."""
    name = f"{client.partition(':')[0]}-{DENIED.index(denied)}"
    root = as_path(f"{client}/{name}")
    for number in (1, 2):
        for file in handmade.make(tmp_path / f"iter_{number:07d}").iterdir():
            (root / f"iter_{number:07d}" / file.name).write_bytes(file.read_bytes())
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    before = objects(str(root))
    with as_user(monkeypatch, denied.replace(" on ", f" on {name}/")):
        for command in ("prune ROOT --keep 1 --yes", "repair ROOT --yes --force", "verify ROOT"):
            result = CliRunner().invoke(application(), command.replace("ROOT", str(root)).split())
            assert result.exit_code == 1, (command, result.output)
            [line] = result.stderr.splitlines()
            assert line.startswith("StorageError: "), line
            assert "403" in line if client == "msc://run" else f"{name}" in line and "not allowed with these" in line
        there, one = as_path(str(root)), as_path(f"{root}/iter_0000002")
        looks = [lambda: entries(there), lambda: being_read(there / "iter_0000001"), one.is_dir]
        for look in looks if denied == DENIED[0] else [(one / "manifest.json").is_file] if denied == DENIED[1] else []:
            with pytest.raises(StoreClientError):
                print(look())
    assert objects(str(root)) == before
    assert as_path(f"{root}/latest_checkpointed_iteration.txt").read_text() == "1"


@contextmanager
def as_user(monkeypatch: pytest.MonkeyPatch, denied: str) -> Iterator[None]:
    """Clients of this process have the credentials of a user who may do all but one thing, as the server checks."""
    action, _, place = denied.partition(" on ")
    arn = "*" if action == "s3:ListBucket" else f"arn:aws:s3:::{BUCKET}/{place}"
    policy: Any = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    policy["Statement"].append({"Effect": "Deny", "Action": action, "Resource": arn})
    iam = importlib.import_module("boto3").client("iam", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    user = f"user-{uuid.uuid4().hex}"
    iam.create_user(UserName=user)
    iam.put_user_policy(UserName=user, PolicyName="all-but-one", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    with monkeypatch.context() as there:
        there.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        there.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        there.setattr(importlib.import_module("moto.settings"), "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
        forget_clients()
        yield
    forget_clients()


def forget_clients() -> None:
    """They keep the credentials that they were made with."""
    file_systems: Any = importlib.import_module("s3fs").S3FileSystem
    file_systems.clear_instance_cache()
    importlib.import_module("multistorageclient.shortcuts")._STORAGE_CLIENT_CACHE.clear()


def test_old_ones_are_pruned_unless_somebody_reads_them(
    environment: dict[str, str], megatron_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = as_path(f"s3://{BUCKET}/pruned")
    for number in (1, 2, 3):
        megatron_ranks.run(train_and_save, f"{root}/iter_000000{number}", environment, 1, ranks=1)
    right = time.time
    with reading(root / "iter_0000001"), monkeypatch.context() as host:
        [mark] = root.glob(".reading-*")
        before = mark.stat().st_mtime
        time.sleep(1.1)  # S3 tells whole seconds
        lease.renew(mark)
        assert mark.stat().st_mtime > before
        host.setattr(time, "time", lambda: right() + 7200.0)  # ahead of the storage's clock
        assert [iteration.number for iteration in prune(root, keep=1)] == [2]
    assert [iteration.number for iteration in prune(root, keep=1)] == [1]
    assert names(str(root)) == ["iter_0000003"]


@pytest.mark.parametrize("root", [*ROOTS, "memory://checkpoints"])
def test_an_upload_that_is_given_up_never_appears(
    root: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated object is worse than none: what stood there stays, unless the client writes in place."""
    found: Any = as_path(root)
    is_s3, client = root.startswith("s3"), found.fs
    if is_s3:
        monkeypatch.setattr(client._inner, "default_block_size", 5 << 20)  # so that three blocks are several parts
    as_path(f"{root}/read").write_bytes(b"what is read")
    for way in (_leave_a_block, _leave_unfinished, *((_fail_to_finish,) if is_s3 else ())):
        for blocks in (1, 3):
            place: Any = as_path(f"{root}/given-up/{way.__name__}-{blocks}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"the older one")
            with pytest.raises(OSError, match="in the middle"):
                way(place, [b"x" * (4 << 20)] * blocks)
            gc.collect()
            with pytest.raises(OSError, match="while reading"), as_path(f"{root}/read").open("rb") as file:
                raise OSError(f"while reading {file.read(1)!r}")
            assert as_path(f"{root}/read").exists()
            assert place.exists() == (place.protocol != "memory"), str(place)
            assert not place.exists() or place.read_bytes() == b"the older one", str(place)
    if is_s3:
        pending = client.call_s3("list_multipart_uploads", Bucket=BUCKET)
        assert not pending.get("Uploads"), "parts that nobody completes are paid for"


def _leave_a_block(place: Any, blocks: list[bytes]) -> None:
    with place.open("wb") as file:
        file.writelines(blocks)
        raise OSError("in the middle")


def _leave_unfinished(place: Any, blocks: list[bytes]) -> None:
    with closing(store_of(place).create()) as growing:
        for block in blocks:
            growing.write(block)
        raise OSError("in the middle")


def _fail_to_finish(place: Any, blocks: list[bytes]) -> None:
    with closing(store_of(place).create()) as growing:
        for block in blocks:
            growing.write(block)
        with patch("s3fs.core.S3File.commit", side_effect=OSError("in the middle")):
            growing.finish()

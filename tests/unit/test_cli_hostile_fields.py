# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Hostile text in one field after another, in every field that has text: whatever a tool says of it, nothing obeys.

The fields are not listed here: all that is text in a manifest, an index file or stock's metadata is replaced in turn.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.soak import forge
from tests.unit import handmade, index_bytes
from tests.unit.test_cli import call
from tests.unit.test_cli_hostile_text import EVIL, KEY, Page

Place = tuple[str | int, ...]
"""The way to a text; a name in a dict that is itself the text has "" after it."""

BEGINNING = EVIL[:5].encode("unicode_escape").decode()


def texts(body: Any, at: Place = ()) -> Iterator[Place]:
    """Where text stands: values, and names in dicts."""
    if isinstance(body, str):
        yield at
    for name, inner in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ():
        if isinstance(body, dict):
            yield (*at, name, "")
        yield from texts(inner, (*at, name))


def fields(body: Any) -> dict[str, Place]:
    """One place for each field: lists have fields of one kind, and so have keys."""
    found: dict[str, Place] = {}
    for place in texts(body):
        shown = [("*" if isinstance(part, int) or str(part) in handmade.KEYS else str(part)) for part in place]
        found.setdefault(".".join(shown), place)
    return found


def with_text(body: Any, place: Place, text: str) -> Any:
    """A copy with another text in a place."""
    body = copy.deepcopy(body)
    *way, last = place
    here = body
    for part in way[:-1] if last == "" else way:
        here = here[part]
    if last == "":
        here[text] = here.pop(way[-1])
    else:
        here[last] = text
    return body


def made(directory: Path) -> Path:
    """A checkpoint with something in every field."""
    directory.parent.mkdir(exist_ok=True)
    handmade.make(directory)
    (directory / "listed").write_bytes(b"extra")
    fill = {"name": "listed", "size": 5, "checksum": forge.checksum(b"extra")}
    forge.edit_manifest(lambda body: body["files"].append(fill))(directory)
    for rank in handmade.HELD:
        handmade.edit(directory, rank, _in_a_family)
    forge.edit_manifest(lambda body: body.update(suffix="", families={"x/1": handmade.WEIGHT}))(directory)
    return directory


def _in_a_family(part: handmade.Part) -> None:
    part["header"]["entries"][list(handmade.KEYS).index(handmade.WEIGHT)].update(family="x/1", component="y")


def obeyed(printed: str) -> list[str]:
    """Lines that a terminal would obey, or that seem to be the tool's own."""
    return [line for line in printed.split("\n") if not line.isprintable() or line.lstrip().startswith("FORGED")]


def use_every_tool(directory: Path, plain: Path, aside: Path, *, converting: bool = True) -> str:
    """Run them on a checkpoint; nothing obeys.  Returns all that they print."""
    page, printed = aside / "map.html", ""
    looking: tuple[tuple[Any, ...], ...] = (
        ("inspect", directory, "--key", "*", "--html", page),
        ("inspect", directory, "--key", "*", "--json"),
        ("families", directory),
        ("verify", directory),
        ("verify", directory, "--json"),
        ("diff", directory, plain),
        ("diff", plain, directory, "--json"),
        ("repair", directory, "--stock-view", "--dry-run"),
    )
    conversions: tuple[tuple[Any, ...], ...] = (
        ("convert", "reshard", "--ranks", 1, directory, aside / "resharded"),
        ("convert", "to-stock", directory, aside / "stock", "--json"),
        ("convert", "from-stock", directory, aside / "safe"),
    )
    for command in looking + conversions * converting:
        result = call(*command, columns=4000)
        assert result.exit_code in (0, 1), (command, result.output)
        assert not obeyed(result.stdout + result.stderr), command
        if "--json" in command and result.stdout:
            json.loads(result.stdout)
        printed += result.stdout + result.stderr
    if page.exists():
        found = page.read_text()
        assert Page(found).tags <= Page.KNOWN
        assert re.sub("\n", "", found).isprintable()
    return printed


PARTS = ("manifest", "header", "record", "texts")


@pytest.mark.parametrize("part", PARTS)
def test_of_this_format(part: str, tmp_path: Path) -> None:
    plain, shown = made(tmp_path / "plain"), set()
    own = index_bytes.decode((plain / handmade.index(0)).read_bytes())
    keys = [text.decode() for text in handmade.texts_of(own)[: len(own["keys"])]]
    bodies = {
        "manifest": forge.read_manifest(plain),
        "header": index_bytes.header_of((plain / handmade.GROUP).read_bytes()),
        "record": json.loads(own["record"]),
    }
    for name, place in fields(bodies.get(part, keys)).items():
        directory = tmp_path / name.replace("/", "") / "iter_0000010"
        shutil.copytree(plain, directory)
        if part == "texts":
            handmade.edit(directory, 0, partial(handmade.rename, key=keys[int(place[0])], new=EVIL))
        elif part == "manifest":
            forge.sign(directory, with_text(bodies[part], place, EVIL))
        elif part == "header":
            hostile = json.dumps(with_text(bodies[part], place, EVIL)).encode()
            data = (directory / handmade.GROUP).read_bytes()
            handmade.replace_group(directory, index_bytes.with_header(data, hostile))
        else:
            record = json.dumps(with_text(bodies[part], place, EVIL)).encode()
            (directory / handmade.index(0)).write_bytes(index_bytes.encode(own | {"record": record}))
        if BEGINNING in use_every_tool(directory, plain, directory.parent, converting=part == "manifest"):
            shown.add(name)
    assert shown >= SHOWN[part]


SHOWN = {
    "manifest": {
        "format", "writer.mbridge-fsdp-ckpt", "topology.world.", "index.*.name", "index.*.checksum",
        "files.*.name", "files.*.checksum",
    },
    "header": {"entries.*.family", "entries.*.dtype"},
    "record": set(),
    "texts": {"*"},
}  # fmt: skip
"""Fields that a tool tells of, so that the test is known to look at what is printed."""


def test_of_stock(tmp_path: Path) -> None:
    """Keys, names of values, and names of files in `.metadata`."""
    plain = made(tmp_path / "plain")
    directory = tmp_path / "stock" / "iter_0000010"
    with warnings.catch_warnings(action="ignore"):
        state = {"model": {KEY.removeprefix("model."): torch.ones(2)}, EVIL: EVIL, "iteration": 10}
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    printed = use_every_tool(directory, plain, directory.parent)
    assert BEGINNING in printed
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for index, where in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(where, relative_path=f"{EVIL}.distcp")
    (directory / "__0_0.distcp").rename(directory / f"{EVIL}.distcp")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    printed = use_every_tool(directory, plain, directory.parent)
    assert BEGINNING in printed
    (directory / f"{EVIL}.distcp").unlink()
    assert BEGINNING in use_every_tool(directory, plain, directory.parent)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"checkpoint": {"ckpt_format": EVIL, "custom_manager_class": EVIL}, EVIL: EVIL}),
        f"checkpoint:\n  ckpt_format: {EVIL}\n",
        f"checkpoint: [{EVIL}",
    ],
    ids=["values", "broken values", "no YAML"],
)
def test_of_a_run_configuration(text: str, tmp_path: Path) -> None:
    directory = made(tmp_path / "run" / "iter_0000010")
    (directory / "run_config.yaml").write_text(text)
    use_every_tool(directory, made(tmp_path / "plain"), directory.parent)
    (directory.parent / "latest_checkpointed_iteration.txt").write_text(EVIL)
    for command in (("prune", directory.parent, "--keep", 1), ("repair", directory.parent, "--dry-run")):
        result = call(*command, columns=4000)
        assert not obeyed(result.stdout + result.stderr)
        assert BEGINNING in result.stdout + result.stderr

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a root's trackers mean: all tools and conversions agree."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.commit import trackers
from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.file_system import FileSystem
from mbridge_fsdp_ckpt.io.files import replace_file
from tests.trackers import CASES, SECRET, STATE, TRACKER, state
from tests.unit import handmade
from tests.unit.test_cli import call


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A root, and what its trackers mean."""
    make, means = CASES[request.param]
    root = tmp_path / "root"
    root.mkdir()
    for name in ("iter_0000010", "iter_0000020", "release"):
        handmade.make(root / name)
    make(root)
    return root, means


def found(root: Path) -> str:
    """What the one reader says, in the words of the table."""
    try:
        directory = find_checkpoint(root)
    except NotACheckpointError as error:
        return f"!{error.found}" if SECRET not in str(error) else "what is nobody's business"
    assert directory.parent == root or directory == root
    return directory.name if directory != root else ""


def read(command: Callable[[Path], tuple[str, ...]]) -> Callable[[Path], str]:
    """What a tool reads of a root, in the words of the table."""

    def said(root: Path) -> str:
        result = call(*command(root), "--json")
        if result.exit_code == 0:
            fields: Any = json.loads(result.stdout)
            return Path(next(fields[name] for name in _FIELDS if name in fields)).name
        text = " ".join(result.stderr.split())
        assert SECRET not in text
        return f"!{text.partition('; found ')[2]}"

    return said


_FIELDS = ("directory", "checkpoint", "a", "source", "root")
TOOLS = {
    "inspect": read(lambda root: ("inspect", str(root))),
    "verify": read(lambda root: ("verify", str(root))),
    "diff": read(lambda root: ("diff", str(root), str(root))),
    "repair --stock-view": read(lambda root: ("repair", "--stock-view", "--dry-run", str(root))),
    "convert reshard": read(lambda root: ("convert", "reshard", str(root), str(root.parent / "out"), "--ranks", "1")),
    "convert to-stock": read(lambda root: ("convert", "to-stock", str(root), str(root.parent / "stock"))),
}


@pytest.mark.parametrize("dies_at", range(4))
@pytest.mark.parametrize("by_bridge", [True, False])
@pytest.mark.parametrize("before", [(40, 40), (40, None), (None, 40), (5, 5)])
def test_a_death_between_trackers_leaves_what_was_meant_or_the_new_one(
    before: tuple[int | None, int | None],
    by_bridge: bool,
    dies_at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that went back to iteration 10 saves 15; 40 is what was saved last before."""
    for number in (5, 10, 15, 40):
        handmade.make(tmp_path / f"iter_{number:07d}")
    for name, named in zip((STATE, TRACKER), before, strict=True):
        if named is not None:
            (tmp_path / name).write_bytes(state(named) if name == STATE else str(named).encode())
    steps = itertools.count()

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if next(steps) == dies_at:
                raise KeyboardInterrupt
            return function(*args)

        return called

    monkeypatch.setattr(trackers, "replace_file", mortal(replace_file))
    monkeypatch.setattr(FileSystem, "remove", mortal(FileSystem.remove))
    with suppress(KeyboardInterrupt):
        trackers.publish(tmp_path, 15, state(15) if by_bridge else None)
    meant = find_checkpoint(tmp_path).name
    assert meant in (f"iter_{max(filter(None, before)):07d}", "iter_0000015")
    if next(steps) <= dies_at:
        assert meant == "iter_0000015"


def test_every_reader_takes_the_trackers_to_mean_the_same(case: tuple[Path, str]) -> None:
    root, means = case
    said = {"find_checkpoint": found(root)} | {name: tool(root) for name, tool in TOOLS.items()}
    if means.startswith("!"):
        wrong = {name: text for name, text in said.items() if not text.startswith(means)}
    elif means:
        wrong = {name: text for name, text in said.items() if text != means}
    else:  # each tool says in its own words what is there
        wrong = {name: text for name, text in said.items() if text and "iter_0000010, iter_0000020" not in text}
    assert not wrong
    pruned(root, means)


def pruned(root: Path, means: str) -> None:
    """What a tracker names stays, whichever is meant; where one is illegible, all stays."""
    older = (root / TRACKER).is_file() and (root / TRACKER).read_bytes() == b"10"  # beside Bridge's of 20
    named = older or means == "iter_0000010" or means.startswith("!iter_0000010, and")
    illegible = means.startswith("!") and "iter_0000020" not in means
    result = call("prune", root, "--keep", "1", "--yes")
    assert (result.exit_code, (root / "iter_0000010").exists()) == (int(illegible), illegible or named)
    assert (root / "iter_0000020").exists()

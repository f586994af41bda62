# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Two runs side by side whose names match each other as patterns: what is listed and deleted goes by exact name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from mbridge_fsdp_ckpt.commit import methods, removal
from mbridge_fsdp_ckpt.commit.retention import being_read, iterations, prune, reading
from mbridge_fsdp_ckpt.io.files import everything_in
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.io.store import store_of
from mbridge_fsdp_ckpt.tools.prune import plan_pruning
from mbridge_fsdp_ckpt.tools.verify import verify
from tests.unit.test_cli_diff import VALUES, build, tensors

NAMES = ("run[1]", "run1"), ("run*", "run2"), ("run?", "run3")


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "local":
        yield tmp_path
        return
    place = UPath("memory://runs", use_listings_cache=False)
    yield place
    place.fs.store.clear()
    place.fs.pseudo_dirs[:] = [""]


def run_at(root: Any, numbers: tuple[int, ...] = (1, 2, 3)) -> Any:
    """A run's root with whole checkpoints."""
    for number in numbers:
        directory = root / f"iter_{number:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        for source in sorted(MADE.iterdir()):
            (directory / source.name).write_bytes(source.read_bytes())
    (root / "latest_checkpointed_iteration.txt").write_bytes(b"3")
    return root


MADE = Path()


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    global MADE
    MADE = build(tmp_path_factory.mktemp("made") / "iter_0000001", tensors(), values=VALUES)


def files_of(root: Any) -> list[str]:
    return sorted(str(path) for path in everything_in(root) if path.is_file())


@pytest.mark.parametrize(("own", "other"), NAMES)
def test_pruning_frees_its_own_and_touches_no_other_run(own: str, other: str, place: Any) -> None:
    one, two = run_at(place / own), run_at(place / other)
    before = files_of(two)
    plan = plan_pruning(one, 1)
    assert plan.size > 0
    assert sum(plan.carry_out().values()) == plan.size
    assert files_of(two) == before
    assert [found.number for found in iterations(one) if found.complete] == [3]


@pytest.mark.parametrize(("own", "other"), NAMES)
def test_a_reader_is_seen_and_nobody_else_s(own: str, other: str, place: Any) -> None:
    one, two = run_at(place / own), run_at(place / other)
    with reading(one / "iter_0000001"):
        assert being_read(one / "iter_0000001")
        assert not being_read(two / "iter_0000001")
        assert [gone.number for gone in prune(one, 1)] == [2]
    assert [gone.number for gone in prune(one, 1)] == [1]


@pytest.mark.parametrize("own", [own for own, _ in NAMES])
def test_a_checkpoint_of_such_a_run_verifies(own: str, place: Any) -> None:
    one = run_at(place / own, (3,))
    found = verify(one / "iter_0000003", header=False, workers=1, progress=Unwatched())
    assert not found.damage
    assert found.checked


@pytest.mark.parametrize(("own", "other"), NAMES)
def test_what_is_removed_goes_by_exact_name(own: str, other: str, place: Any) -> None:
    for name in (own, other):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    store_of(place / own).remove()
    store_of(place / own).remove()
    assert (place / other).read_bytes() == b"x"
    (place / own).write_bytes(b"x")
    assert removal.delete(place / own)
    assert (place / other).read_bytes() == b"x"
    assert not (place / own).exists()


def test_a_whole_checkpoint_is_removed(place: Any) -> None:
    one, two = run_at(place / "run[1]"), run_at(place / "run1")
    before = files_of(two)
    methods.remove(one / "iter_0000001")
    assert not (one / "iter_0000001" / "manifest.json").exists()
    assert files_of(two) == before

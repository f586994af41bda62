# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ and the snippets of README.md, run as they are on CPU ranks.

examples/verl.sh and README's line for VeRL are composed in tests/verl/test_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import BRIDGE_MODULES, MEGATRON_MODULES
from testing.ranks import RankPool
from testing.templates import Templates
from tests.core import oracle
from tests.examples import running
from tests.examples.running import EXAMPLES, Script
from tests.patience import patient_ranks
from tests.recipes.runs import CPU
from tests.run_directories import as_it_was


@pytest.fixture(scope="module")
def pool(templates: Templates) -> Iterator[RankPool]:
    """Ranks that run what needs no Megatron-Bridge."""
    yield from patient_ranks(templates, ("megatron_fsdp",), MEGATRON_MODULES)


@pytest.fixture(scope="module")
def bridge_pool(templates: Templates) -> Iterator[RankPool]:
    """Ranks that have imported Megatron-Bridge."""
    yield from patient_ranks(templates, ("transformer_engine", "megatron.bridge"), BRIDGE_MODULES, ranks=2)


def native(name: str, folder: Path, steps: int, *more: str) -> Script:
    """A start of a script that needs no framework."""
    return Script(name, str(folder), (str(folder), "--steps", str(steps), "--backend", "gloo", *more))


def test_native_asynchronous_and_elsewhere(pool: RankPool, tmp_path: Path) -> None:
    """One training in four ways: resumed; saved beside it; and in another layout, which changes rounding alone."""
    whole = pool.run(running.run, native("native.py", tmp_path / "a", 6), ranks=2)[0]
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    resumed = pool.run(running.run, native("native.py", Path(as_it_was(tmp_path / "a", tmp_path / "b")), 6), ranks=2)[0]
    assert resumed == {step: whole[step] for step in (3, 4, 5, 6)}
    saved = {step: oracle.on_disk(tmp_path / "a" / f"iter_000000{step}") for step in (4, 6)}
    assert oracle.on_disk(tmp_path / "b" / "iter_0000006") == saved[6]

    beside = pool.run(running.run, native("asynchronous.py", tmp_path / "c", 4), ranks=2)[0]
    assert beside == {step: whole[step] for step in (1, 2, 3, 4)}
    assert sorted(path.name for path in (tmp_path / "c").glob("iter_*")) == [f"iter_000000{n}" for n in (1, 2, 3, 4)]
    assert oracle.on_disk(tmp_path / "c" / "iter_0000004") == saved[4]

    script = native("resume_elsewhere.py", tmp_path / "c", 6, "--tensor", "2")
    elsewhere = pool.run(running.run, script, ranks=4)[0]
    assert {step: float(loss) for step, loss in elsewhere.items()} == pytest.approx(
        {step: float(whole[step]) for step in (5, 6)}, rel=1e-4
    )


def test_the_snippets_without_a_framework(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(running.native_snippets, str(tmp_path), ranks=2) == [(10, True)] * 2
    guide = (running.README.parent / "docs" / "native.md").read_text()
    assert running.snippets()[2] in guide
    assert running.snippets()[0] in (running.README.parent / "docs" / "bridge.md").read_text()


@pytest.mark.bridge
def test_bridge_and_its_snippet(bridge_pool: RankPool, tmp_path: Path) -> None:
    """What README's snippet saves, the example goes on from."""

    def script(folder: Path) -> Script:
        places = [f"checkpoint.{name}={folder}" for name in ("save", "load")]
        return Script("bridge.py", str(folder), (*CPU, *places), te_modules=True)

    (whole,) = filter(None, bridge_pool.run(running.bridge_snippet, script(tmp_path / "a"), ranks=2))
    copy = Path(as_it_was(tmp_path / "a", tmp_path / "b"))
    (resumed,) = filter(None, bridge_pool.run(running.run, script(copy), ranks=2))
    assert list(whole) == [1, 2, 3, 4]
    assert resumed == {step: whole[step] for step in (3, 4)}
    last = [oracle.on_disk(tmp_path / run / "iter_0000004") for run in ("a", "b")]
    assert last[0] == last[1]


def test_no_example_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == {
        "training.py",
        "native.py",
        "asynchronous.py",
        "resume_elsewhere.py",
        "bridge.py",
        "verl.sh",
    }

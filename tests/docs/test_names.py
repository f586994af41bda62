# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every file, test, module, command and name that the pages and the package's own text name is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "mbridge_fsdp_ckpt"
PLACES = ("*.md", "docs/**/*.md", "recipes/*.md", "benchmarks/**/*.md", "tests/**/*.md")
PAGES = sorted({page for place in PLACES for page in REPOSITORY.glob(place) if page.name != "CHANGELOG.md"})
TEXTS = [*PAGES, *sorted(PACKAGE.rglob("*.py"))]

FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
ROOTS = "|".join(["tests", "docs", "benchmarks", "tools", "requirements", "mbridge_fsdp_ckpt", *FOLDERS])
FILE = re.compile(
    rf"(?<![\w./*-])(?:{ROOTS})/(?:[\w.-]+/)*(?:[\w-]+\.(?:py|md|json|ya?ml|toml|sh|txt|png|svg)\b|(?=`))"
)
BARE_FILE = re.compile(r"`([a-z_]+\.(?:py|toml|yml))`")
TEST_OF_FILE = re.compile(r"`([\w/]+?)(?:\.py)?::([\w.]+)(?:\[([^\]`]*)\])?`")
TEST = re.compile(r"`(test_\w+)`")
SHORT_NAME = re.compile(r"`(\w+)` is\s+`(tests/[\w/]+\.py)`")
MODULE = re.compile(r"(?<![\w.])mbridge_fsdp_ckpt((?:\.[A-Za-z_]\w*)+)")
MODULE_OF_FOLDER = re.compile(rf"`((?:{'|'.join(name for name in FOLDERS if name != 'verl')})(?:\.\w+)+)`")
STARTED = re.compile(r"-m ((?:tests|tools|benchmarks|mbridge_fsdp_ckpt)\b[\w.]*\w)")
TARGET = re.compile(r"(?:`|^|\$ )make ([a-z][a-z-]*)\b", re.MULTILINE)
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
DEFINED = re.compile(r"\b(?:def|class|type) (\w+)|^[ \t]*(?:self\.)?(\w+)\b[^\n=:(]*(?::|=)", re.MULTILINE)

UPSTREAM = {"train.py", "pretrain_gpt.py", "swift_safe.py", "convert_checkpoints_fsdp.py"}
UPSTREAM |= {"test_fsdp_layout_change_ignores_rng_state", "test_fsdp_dtensor_skips_tracker_resolution"}
UPSTREAM |= {"param_and_grad_buffer.py", "utils.py"}
"""Files and tests of Megatron's and Megatron-Bridge's, and a user's own."""
INTERNAL = {"mbridge_fsdp_ckpt.removal", "mbridge_fsdp_ckpt.__path__"}
"""A thread's name, and an attribute that every package has."""

WORDS_ON_DISK = {"json", "jsonl", "distcp", "toml", "exp_avg", "torch_dist", "fsdp_dtensor", "sharded"}


@cache
def names_in(place: Path) -> frozenset[str]:
    """What a file, or a folder's files, define: functions, classes, fields."""
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return frozenset(name for file in files for found in DEFINED.findall(file.read_text()) for name in found if name)


@cache
def strings_in_tests() -> str:
    return "\n".join(path.read_text() for path in sorted((REPOSITORY / "tests").rglob("*.py")))


def missing_files(text: str) -> Iterator[str]:
    for path in FILE.findall(text):
        if not (REPOSITORY / path).exists() and not (PACKAGE / path).exists():
            yield path
    for name in BARE_FILE.findall(text):
        if name not in UPSTREAM and not (REPOSITORY / name).exists() and not any(PACKAGE.rglob(name)):
            yield name


def missing_tests(text: str) -> Iterator[str]:
    short = dict(SHORT_NAME.findall(text))
    for file, test, case in TEST_OF_FILE.findall(text):
        path = REPOSITORY / short.get(file, f"{file}.py")
        if not path.exists() or (not test.endswith("...") and test != "ROW" and test not in names_in(path)):
            yield f"{file}::{test}"
        elif case not in ("", "ROW-CELL", "CELL") and f'"{case}"' not in strings_in_tests():
            yield f"{file}::{test}[{case}]"
    yield from (name for name in TEST.findall(text) if name not in names_in(REPOSITORY / "tests") | UPSTREAM)


def missing_modules(text: str) -> Iterator[str]:
    for dotted in [*MODULE.findall(text), *(f".{name}" for name in MODULE_OF_FOLDER.findall(text))]:
        place, parts = PACKAGE, dotted.strip(".").split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        if parts and (place / f"{parts[0]}.py").exists():
            place /= f"{parts.pop(0)}.py"
        file = place / "__init__.py" if place.is_dir() else place
        name = f"mbridge_fsdp_ckpt{dotted}"
        if parts and name not in INTERNAL and not re.search(rf"\b{parts[0]}\b", file.read_text()):
            yield name
    for dotted in STARTED.findall(text):
        place = REPOSITORY / dotted.replace(".", "/")
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
            yield f"python -m {dotted}"


def missing_targets(text: str) -> Iterator[str]:
    makefile = (REPOSITORY / "Makefile").read_text()
    yield from (f"make {name}" for name in TARGET.findall(text) if not re.search(rf"(?m)^{name}:", makefile))


@pytest.mark.parametrize("missing", [missing_files, missing_tests, missing_modules, missing_targets])
def test_what_is_named_is_there(missing: Callable[[str], Iterator[str]]) -> None:
    found = {path.relative_to(REPOSITORY).as_posix(): sorted(set(missing(path.read_text()))) for path in TEXTS}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_name_of_the_architecture_is_one_of_the_code() -> None:
    names = IDENTIFIER.findall((REPOSITORY / "docs" / "architecture.md").read_text())
    known = names_in(PACKAGE) | {path.stem for path in PACKAGE.rglob("*")} | set(FOLDERS)
    last = {name.rpartition(".")[2] for name in names if "/" not in name and not name.startswith("megatron.")}
    assert len(last) >= 40
    assert last - known - WORDS_ON_DISK == set()


def test_a_stale_name_is_seen() -> None:
    text = (
        "`layouts` is `tests/core/test_layouts.py`: `layouts::test_gone`, `tests/gone/test_x.py`, `plan/gone.py`, "
        "`test_gone_too`, `layouts::...[gone case]`, `gone.py`, `tests/gone/`, mbridge_fsdp_ckpt.plan.gone, "
        "`loading.gone`, mbridge_fsdp_ckpt.gone, `python -m tests.gone`, `make gone`"
    )
    assert list(missing_files(text)) == ["tests/gone/test_x.py", "plan/gone.py", "tests/gone/", "gone.py"]
    assert list(missing_tests(text)) == ["layouts::test_gone", "layouts::...[gone case]", "test_gone_too"]
    assert [name.rpartition(".")[2] for name in missing_modules(text)] == ["gone"] * 4
    assert list(missing_targets(text)) == ["make gone"]

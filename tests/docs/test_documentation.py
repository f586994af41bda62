# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The documentation builds, and the commands on its pages work as printed.

Commands of docs/recipes.md, docs/verl.md and docs/conversion.md are run beside the code that they start: tests/recipes,
tests/verl, tests/convert.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.docs import saving
from tests.soak import sampling

REPOSITORY = Path(__file__).parents[2]
ELSEWHERE = {"recipes.md", "verl.md", "conversion.md"}
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
LINKING = sorted(
    {*PAGES, *(page for place in ("*", "docs/decisions/*", "examples/*") for page in REPOSITORY.glob(f"{place}.md"))}
)
FENCED = re.compile(r"^```(console|sh|)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = ("mbridge_fsdp_ckpt", "torchrun", "make", "pip", "MBRIDGE_FSDP_CKPT_TAKEOVER=1 torchrun")

SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--ckpt-format", choices=["fsdp_dtensor"], default="fsdp_dtensor")
given, _ = parser.parse_known_args()
from mbridge_fsdp_ckpt.integrations.common.after_import import AfterImport
os.write(1, f"RANK {os.environ['RANK']} {given.ckpt_format}\\n".encode())  # in one piece: the ranks share the pipe
"""


def commands() -> list[tuple[str, str]]:
    """(page, command) of every command in a block; a backslash joins lines."""
    found = []
    for page in PAGES:
        for kind, block in FENCED.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.removeprefix("$ ").partition("  #")[0].partition("    #")[0].strip()
                if (line.startswith("$ ") or kind != "console") and text.startswith(PROGRAMS):
                    found.append((page.name, " ".join(text.split())))
    return found


COMMANDS = [(page, text) for page, text in commands() if page not in ELSEWHERE]
TOOLS = [
    (page, text)
    for page, text in COMMANDS
    if text.startswith("mbridge_fsdp_ckpt ") and (sampling.FULL or "--world 8960" not in text)  # more than a minute
]
LAUNCHES = [(page, text) for page, text in COMMANDS if "torchrun " in text]


@pytest.fixture(scope="module")
def folder(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader might stand: a run's checkpoints, two more, two scripts."""
    place = tmp_path_factory.mktemp("reader")
    for name, number, layers in (
        ("checkpoints", 10, 1),
        ("checkpoints", 20, 1),
        ("before", 10, 1),
        ("after", 11, 2),
    ):
        megatron_ranks.run(saving.save, str(place / name / f"iter_{number:07d}"), number, layers, ranks=2)
    (place / "before" / "latest_checkpointed_iteration.txt").write_text("10")
    made = in_shell("mbridge_fsdp_ckpt convert to-stock before stock/iter_0000010", place)
    assert made.returncode == 0, made.stderr
    (place / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    shutil.copytree(place / "before" / "iter_0000010", place / "A")
    shutil.copytree(place / "after" / "iter_0000011", place / "B")
    for script in ("train.py", "pretrain_gpt.py"):
        (place / script).write_text(SCRIPT)
    return place


def in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_there_are_commands_and_none_is_left_out() -> None:
    assert {page for page, _ in commands()} >= {
        "README.md",
        "start.md",
        "migrate.md",
        "megatron_lm.md",
        "gpu.md",
        "tools.md",
    }
    assert len(COMMANDS) >= 20
    assert 'pip install ".[tools]"' in [text for _, text in COMMANDS], "what tests/packaging builds and installs"


@pytest.mark.parametrize(("page", "command"), sampling.drawn("commands of the pages", TOOLS, share=3))
def test_the_tools(page: str, command: str, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "reader"
    shutil.copytree(folder, place)
    sure = command if "--yes" in command or "--dry-run" in command or " prune " not in command else f"{command} --yes"
    ended = in_shell(sure, place)
    different = command.startswith("mbridge_fsdp_ckpt diff")
    assert (ended.returncode, ended.stderr) == (1 if different else 0, "")
    assert ended.stdout


@pytest.mark.parametrize(("page", "command"), [c for c in COMMANDS if c[1].startswith("make ")])
def test_the_targets(page: str, command: str) -> None:
    _, *words = shlex.split(command)
    ended = in_shell(f"make --dry-run {shlex.join(words)}", REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    for word in words:
        if word.startswith("ARGS="):
            assert word.removeprefix("ARGS=") in ended.stdout


@pytest.mark.parametrize(("page", "command"), sampling.drawn("launches of the pages", LAUNCHES, share=4))
def test_the_launches(page: str, command: str, folder: Path) -> None:
    """On two ranks instead of eight, with a script that knows stock's name alone, and so sees it in place of ours."""
    assert "--nproc-per-node 8" in command
    two = command.replace("--nproc-per-node 8", "--nproc-per-node 2 --standalone").removesuffix(" ...")
    ended = in_shell(two, folder)
    assert ended.returncode == 0, ended.stderr
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("RANK")) == [
        f"RANK {rank} fsdp_dtensor" for rank in range(2)
    ]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    ended = in_shell("zensical build --clean --strict", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pages = {path.parent.name for path in (tmp_path / "out" / "site").glob("*/index.html")}
    assert pages >= {page.stem for page in PAGES if page.parent.name == "docs" and page.stem != "index"}


def test_every_page_is_in_the_navigation() -> None:
    listed = (REPOSITORY / "mkdocs.yml").read_text()
    there = [path.relative_to(REPOSITORY / "docs").as_posix() for path in REPOSITORY.glob("docs/**/*.md")]
    assert [name for name in there if name not in listed] == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", page.read_text())
    for target, anchor in targets:
        place = page if not target else page.parent / target
        assert place.exists(), f"{target} of {page.name}"
        if anchor and place.suffix == ".md":
            headings = [line.lstrip("# ") for line in place.read_text().splitlines() if line.startswith("#")]
            assert anchor[1:] in [slug(heading) for heading in headings], f"{target}{anchor} of {page.name}"


def slug(heading: str) -> str:
    """As the site makes them."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")

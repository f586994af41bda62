# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The first line of every source file, its licence:  python -m tools.headers  puts it where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("mbridge_fsdp_ckpt", "testing", "recipes", "examples", "tests", "benchmarks", "tools")
HEADER = "# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0\n"


def without() -> Iterator[Path]:
    """Python and shell files that lack it; an empty file needs none."""
    found = [path for folder in FOLDERS for kind in ("*.py", "*.sh") for path in (REPOSITORY / folder).rglob(kind)]
    for path in sorted(found):
        if path.stat().st_size and HEADER not in path.read_text().splitlines(keepends=True)[:2]:
            yield path


def add(path: Path) -> None:
    """Put it first, or behind the line that names the interpreter."""
    first, rest = "", path.read_text()
    if rest.startswith("#!"):
        first, _, rest = rest.partition("\n")
        first += "\n"
    path.write_text(first + HEADER + rest)


if __name__ == "__main__":
    for lacking in without():
        add(lacking)

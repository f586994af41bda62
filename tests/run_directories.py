# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Directories of training runs."""

from __future__ import annotations

import shutil
from pathlib import Path


def as_it_was(source: Path, target: Path, iteration: int = 2) -> str:
    """A copy of a run's directory as it was when that iteration's was its only checkpoint."""
    name = f"iter_{iteration:07}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(target)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A golden checkpoint fills a live model of another layout, whichever stack wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core import cases
from tests.golden import cases as golden
from tests.golden.archive import SUFFIX, unpack

LOADED = {"fused_adam_2_ranks": {"tensor": 2}, "offload_tensor_2": {"tensor": 1}}
"""In which layout each is loaded; the first needs Transformer Engine."""

GOLDEN = [
    (folder, name)
    for folder in sorted(golden.FOLDER.glob("safe-*"))
    for name in LOADED
    if (folder / f"{name}{SUFFIX}").exists() and (name.startswith("offload") or is_installed("transformer_engine"))
]


@pytest.mark.parametrize(("folder", "name"), GOLDEN, ids=lambda part: getattr(part, "name", part))
def test_a_golden_checkpoint_loads_in_another_layout(
    folder: Path, name: str, megatron_ranks: RankPool, tmp_path: Path
) -> None:
    directory = unpack(folder / f"{name}{SUFFIX}", tmp_path / name)
    recipe = golden.SAFE[name].recipe.on(**LOADED[name])
    loaded = megatron_ranks.run(cases.load_and_save, str(directory), "", recipe, ranks=2)[0]
    found = {key: [dtype, list(shape), digest] for key, (dtype, shape, digest) in loaded["live"].items()}
    assert found == json.loads((folder / "expected.json").read_text())[name]

"""A golden checkpoint fills a live model of another layout."""

from __future__ import annotations

import json
from pathlib import Path

from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.core import cases
from tests.golden import cases as golden
from tests.golden.archive import SUFFIX, unpack


def test_a_golden_checkpoint_loads_in_another_layout(megatron_ranks: RankPool, tmp_path: Path) -> None:
    (folder,) = golden.FOLDER.glob("safe-*")
    name = "fused_adam_2_ranks"
    directory = unpack(folder / f"{name}{SUFFIX}", tmp_path / name)
    recipe = golden.SAFE[name].recipe.on(tensor=2)
    loaded = megatron_ranks.run(cases.load_and_save, str(directory), "", recipe, ranks=2)[0]
    found = {key: [dtype, list(shape), digest] for key, (dtype, shape, digest) in loaded["live"].items()}
    assert found == json.loads((folder / "expected.json").read_text())[name]

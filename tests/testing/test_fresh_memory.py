# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks find NaN in memory that nothing has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mbridge_fsdp_ckpt.io.ranges import Arena, OpenFiles, Scratch
from mbridge_fsdp_ckpt.saving.background.memory import Staging
from testing.ranks import RankPool, no_process_group

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def all_nan(memory: Any) -> bool:
    """Whether bytes are NaN, in whichever dtype."""
    return all(bool(torch.from_numpy(memory).view(dtype).isnan().all()) for dtype in FLOATS)


@no_process_group
def unwritten() -> dict[str, bool]:
    like = torch.zeros(3, 4)
    made = [torch.empty(3, dtype=dtype) for dtype in FLOATS]
    made += [torch.empty_like(like), like.new_empty(2), torch.empty_strided((2, 2), (1, 2)), torch.empty(0).resize_(3)]
    staging = Staging.create(2)
    found = {
        "torch": all(bool(tensor.isnan().all()) for tensor in made),
        "integers": torch.empty(2, dtype=torch.int32).tolist() == [torch.iinfo(torch.int32).max] * 2,
        "staging": all_nan(np.array(staging.bytes)),
    }
    staging.close()
    for memory in (Scratch(), Arena()):
        first = memory.take(64)
        found[type(memory).__name__] = all_nan(first)
        first[:] = 0
        found[f"{type(memory).__name__} again"] = all_nan(memory.take(64))
    return found


@no_process_group
def switch_off() -> None:
    torch.use_deterministic_algorithms(False)
    torchs_own: Any = torch.utils.deterministic
    torchs_own.fill_uninitialized_memory = False


@no_process_group
def read(path: Path) -> bytes:
    files = OpenFiles()
    assert bytes(files.read(path, 1, 3, scratch=Scratch())) == bytes(files.read(path, 1, 3, None, Arena()))
    return bytes(files.read(path, 1, 3))


def test_what_nothing_has_written_is_nan_in_each_case(rank_pool: RankPool) -> None:
    [found] = rank_pool.run(unwritten, ranks=1)
    assert found == dict.fromkeys(found, True)
    rank_pool.run(switch_off, ranks=1)
    assert rank_pool.run(unwritten, ranks=1) == [found], "each case begins with it"


def test_what_was_read_is_what_the_file_has(rank_pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    assert rank_pool.run(read, path, ranks=1) == [b"yte"]


def test_a_pool_that_measures_leaves_memory_as_it_comes() -> None:
    with RankPool(1, nan_memory=False) as pool:
        [found] = pool.run(unwritten, ranks=1)
    assert not any(found.values())

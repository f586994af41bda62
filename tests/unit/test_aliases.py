# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which destinations of a load lie on each other."""

from __future__ import annotations

import pytest
import torch

from mbridge_fsdp_ckpt.loading.aliases import overlapping
from mbridge_fsdp_ckpt.loading.destinations import Destination
from mbridge_fsdp_ckpt.plan.boxes import whole

FLAT = torch.zeros(24)


def destination(memory: torch.Tensor) -> Destination:
    return Destination(whole(tuple(memory.shape)), memory)


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        ({"a": [FLAT[:8]], "b": [FLAT[8:16]], "c": [FLAT[16:]]}, []),  # parameters of one flat buffer
        ({"a": [FLAT[:8], FLAT[4:12]]}, []),  # of one key
        ({"a": [FLAT[8:8]], "b": [FLAT]}, []),  # nothing of it is filled
        ({"a": [FLAT[16:]], "b": [FLAT[:9]], "c": [FLAT[8:12]]}, [["b", "c"]]),
        ({"a": [FLAT.view(4, 6)[:, 1]], "b": [FLAT[18:20]]}, [["a", "b"]]),  # the column's last element is 19
        ({"a": [FLAT.view(4, 6)[:, 1]], "b": [FLAT[20:]]}, []),
        ({"a": [FLAT], "b": [FLAT[2:4]], "c": [FLAT[20:22]]}, [["a", "b", "c"]]),
        ({"a": [FLAT[3]], "b": [FLAT[3:4].view(torch.uint8)[1:2]]}, [["a", "b"]]),
        ({"a": [FLAT], "b": [torch.from_numpy(FLAT.numpy())]}, [["a", "b"]]),  # storages of their own
    ],
)
def test_memory_that_several_keys_fill(memories: dict[str, list[torch.Tensor]], expected: list[list[str]]) -> None:
    targets = {key: [destination(memory) for memory in held] for key, held in memories.items()}
    assert [[filled.key for filled in together] for together in overlapping(targets)] == expected

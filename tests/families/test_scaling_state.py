# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 scaling state of a whole model under Megatron-FSDP: each module's, and each expert's, in any layout.

No FP8 kernel runs on CPU ranks: Transformer Engine's own functions make the state, and numbers that follow from a
module's name and an expert's number over all ranks fill it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mbridge_fsdp_ckpt
from testing.kernels import replace_cuda_only_kernels
from testing.modules import is_installed
from testing.ranks import RankPool
from tests.core.test_extra_state import start
from tests.families import models
from tests.families.reference import Layout, initialise, wrap

pytestmark = pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs Transformer Engine")

WAYS = {"scaling_fwd": 3, "scaling_bwd": 2}  # columns a GEMM


def _columns(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of scaling state by a name that is the same in every layout, a GEMM's columns at a time."""
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank()
    for name, module in model.named_modules():
        if ".experts." not in name and "grouped" not in name:
            continue
        if not hasattr(module, "init_fp8_metadata") or not hasattr(module, "fp8_meta"):
            continue
        if "scaling_fwd" not in module.fp8_meta:
            start(module)
        count = getattr(module, "num_gemms", 1)
        first = rank * count if ".experts." in name else 0
        for way, width in WAYS.items():
            state = module.fp8_meta[way]
            for gemm in range(count):
                place = slice(gemm * width, (gemm + 1) * width)
                yield f"{name} {first + gemm} {way} scale", state.scale[place]
                yield f"{name} {first + gemm} {way} history", state.amax_history[:, place]


def _numbers(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _model(layout: Layout) -> Any:
    replace_cuda_only_kernels()
    initialise(layout, 1)
    return wrap(models.build("experts_gated", layout), layout)


def save(directory: str, layout: Layout) -> int:
    subject, count = _model(layout), 0
    for name, columns in _columns(subject.fsdp):
        columns.copy_(_numbers(name, columns.shape))
        count += 1
    mbridge_fsdp_ckpt.save(directory, model=subject.model)
    return count


def load(directory: str, layout: Layout) -> tuple[list[str], list[str]]:
    """Names of what was compared, and of what differs."""
    subject = _model(layout)
    list(_columns(subject.fsdp))
    mbridge_fsdp_ckpt.load(directory, model=subject.model)
    found = list(_columns(subject.fsdp))
    return [name for name, _ in found], [name for name, t in found if not torch.equal(t, _numbers(name, t.shape))]


@pytest.fixture(scope="module")
def saved(megatron_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8") / "checkpoint"
    assert min(megatron_ranks.run(save, str(directory), Layout(4, tensor=2, expert=2), ranks=4)) > 0
    return directory


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(4, expert=4), Layout(2, tensor=2), Layout(4, tensor=2, expert=2), Layout(2, strategy="no_shard")],
    ids=["1 rank", "EP 4", "TP 2", "TP 2, EP 2", "no_shard"],
)
def test_scaling_state_comes_back_in_any_layout(layout: Layout, saved: Path, megatron_ranks: RankPool) -> None:
    ranks = megatron_ranks.run(load, str(saved), layout, ranks=layout.ranks)
    assert [different for _, different in ranks] == [[]] * layout.ranks
    compared = {name for names, _ in ranks for name in names}
    assert {name.split()[1] for name in compared if ".experts." in name} == {"0", "1", "2", "3"}
    assert any(".shared_experts." in name for name in compared)

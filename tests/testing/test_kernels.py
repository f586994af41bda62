# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The stand-ins compute what the CUDA kernels compute, and take their place wherever they were imported."""

import importlib
from typing import Any

import pytest
import torch

from testing import kernels
from testing.modules import is_installed
from testing.ranks import RankPool

STEPS, LEARNING_RATE, BETAS, EPSILON, DECAY = 3, 0.1, (0.9, 0.99), 1e-6, 0.05


def adam_by_torch(optimizer_class: type[torch.optim.Optimizer]) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    settings: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
    optimizer = optimizer_class([weight], **settings)
    for step in range(STEPS):
        weight.grad = torch.tensor([0.5, 0.25, -1.0]) * (step + 1)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(("mode", "optimizer_class"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam_is_torch_adam(mode: int, optimizer_class: type[torch.optim.Optimizer]) -> None:
    weight, exp_avg, exp_avg_sq = torch.tensor([1.0, -2.0, 3.0]), torch.zeros(3), torch.zeros(3)
    for step in range(STEPS):
        grad = torch.tensor([0.5, 0.25, -1.0]) * (step + 1)
        lists = [[grad], [weight], [exp_avg], [exp_avg_sq]]
        kernels.adam_stand_in(0, torch.zeros(1), lists, LEARNING_RATE, *BETAS, EPSILON, step + 1, mode, 1, DECAY)
    torch.testing.assert_close(weight, adam_by_torch(optimizer_class))


def test_adam_keeps_master_weights_apart_from_rounded_ones() -> None:
    weight, master = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    lists = [[torch.ones(1)], [weight], [torch.zeros(1)], [torch.zeros(1)], [master]]
    kernels.adam_stand_in(0, torch.zeros(1), lists, 1e-4, *BETAS, 0.0, 1, 1, 1, 0.0)
    assert master.item() == pytest.approx(0.9999)
    assert weight.item() == 1.0


def test_norms_and_scaling() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    norm, each = kernels.l2_norm_stand_in(0, torch.zeros(1), [tensors], True)
    assert norm.tolist() == [5.0]
    assert each.tolist() == [3.0, 4.0]
    kernels.scale_stand_in(0, torch.zeros(1), [tensors, tensors], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[1.5], [0.0, 2.0]]


def test_normalized_rows_have_length_one() -> None:
    rows = kernels.l2_normalize_stand_in(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.0, 1.0]]))


def step_fused_adam() -> torch.Tensor:
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = FusedAdam([weight], lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    for step in range(STEPS):
        weight.grad = torch.tensor([0.5, 0.25, -1.0]) * (step + 1)
        optimizer.step()
    return weight.detach()


def use_and_restore_kernels() -> tuple[torch.Tensor, float, list[float], bool]:
    from megatron.core.optimizer import clip_grads

    transformer_engine_torch = importlib.import_module("transformer_engine_torch")  # loaded by the import above

    before = (transformer_engine_torch.multi_tensor_adam, clip_grads.l2_norm_impl)
    kernels.replace_cuda_only_kernels()
    kernels.replace_cuda_only_kernels()
    weight = step_fused_adam()
    clipped = torch.nn.Parameter(torch.zeros(2))
    clipped.grad = torch.tensor([3.0, 4.0])
    norm = clip_grads.get_grad_norm_fp32([clipped.grad])
    clip_grads.clip_grad_by_total_norm_fp32([clipped], 1.0, norm)
    kernels.restore_kernels()
    restored = before == (transformer_engine_torch.multi_tensor_adam, clip_grads.l2_norm_impl)
    return weight, float(norm), clipped.grad.tolist(), restored


@pytest.mark.skipif(not is_installed("transformer_engine"), reason="needs transformer_engine, which is not installed")
def test_fused_adam_and_gradient_clipping_run_on_them(megatron_ranks: RankPool) -> None:
    ((weight, norm, clipped, restored),) = megatron_ranks.run(use_and_restore_kernels, ranks=1)
    torch.testing.assert_close(weight, adam_by_torch(torch.optim.AdamW))
    assert norm == 5.0
    assert clipped == pytest.approx([0.6, 0.8])
    assert restored

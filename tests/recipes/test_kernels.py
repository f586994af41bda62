# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The torch functions in place of CUDA kernels compute what those are documented to compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from testing.ranks import RankPool
from tests.recipes import kernels


def attention(causal: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    query, key, value = causal.split([8, 2, 2], dim=2)
    unfused = SimpleNamespace(softmax_scale=causal.shape[3] ** -0.5)
    module = SimpleNamespace(cp_group=group, unfused_attention=unfused)
    return kernels._attention(module, query, key, value)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_attention_is_torchs_own() -> None:
    whole = drawn(12, 2, 12, 16)
    query, key, value = (part.permute(1, 2, 0, 3) for part in whole.split([8, 2, 2], dim=2))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(whole), expected.permute(2, 0, 1, 3).flatten(2))


def attention_of_my_part() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Positions of this rank's tokens, what it computes for them, and the gradient of all that is computed."""
    group = dist.group.WORLD
    whole = drawn(12, 2, 12, 16)
    positions = kernels._positions(12 // dist.get_world_size(), group)
    own = whole[positions].requires_grad_()
    result = attention(own, group)
    result.square().sum().backward()
    assert own.grad is not None
    return positions.tolist(), result.detach(), own.grad


@pytest.mark.bridge
def test_attention_under_context_parallelism_is_the_same(bridge_ranks: RankPool) -> None:
    whole = drawn(12, 2, 12, 16).requires_grad_()
    expected = attention(whole)
    expected.square().sum().backward()
    assert whole.grad is not None
    parts = bridge_ranks.run(attention_of_my_part, ranks=2)
    assert [positions for positions, _, _ in parts] == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    for positions, result, gradient in parts:
        torch.testing.assert_close(result, expected.detach()[positions])
        torch.testing.assert_close(gradient, whole.grad[positions])


def test_the_scan_is_the_recurrence() -> None:
    batch, length, heads, channels, groups, state = 2, 9, 4, 3, 2, 5
    inner, projected = heads * channels, 2 * groups * state
    packed = drawn(batch, length, 2 * inner + projected + heads)
    weight, bias = drawn(inner + projected, 4), drawn(inner + projected)
    dt_bias, a, skip = drawn(heads), -drawn(heads).exp(), drawn(heads)
    found = kernels._scan(packed, weight, bias, dt_bias, a, D=skip, headdim=channels, ngroups=groups, activation="silu")
    z, mixed, dt = packed.split([inner, inner + projected, heads], dim=-1)
    for row in range(batch):
        memory = torch.zeros(heads, channels, state)
        for step in range(length):
            window = [
                mixed[row, step - 3 + k] if step - 3 + k >= 0 else torch.zeros(inner + projected) for k in range(4)
            ]
            convolved = F.silu(sum((weight[:, k] * window[k] for k in range(4)), bias))
            x, b, c = convolved.split([inner, groups * state, groups * state])
            for head in range(heads):
                group = head * groups // heads
                size = F.softplus(dt[row, step, head] + dt_bias[head])
                own = x[head * channels : (head + 1) * channels]
                b_own, c_own = (part[group * state : (group + 1) * state] for part in (b, c))
                memory[head] = memory[head] * (size * a[head]).exp() + size * own[:, None] * b_own
                expected = (memory[head] @ c_own + skip[head] * own) * F.silu(
                    z[row, step, head * channels : (head + 1) * channels]
                )
                torch.testing.assert_close(found[row, step, head * channels : (head + 1) * channels], expected)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_is_torchs_own(zero_centered: bool) -> None:
    hidden, weight = drawn(3, 16), drawn(16)
    expected = F.rms_norm(hidden, (16,), 1 + weight if zero_centered else weight, 1e-6)
    torch.testing.assert_close(kernels._normalized(hidden, weight, 1e-6, zero_centered), expected)

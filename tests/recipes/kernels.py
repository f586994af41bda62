# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Forward passes in torch for Transformer Engine's modules, Mamba's scan and FLA's delta rule: none runs without CUDA.

The modules stay the real ones, with their parameters, names and process groups, so that a checkpoint of them is the
recipe's.  What they compute is what their kernels compute, in the parameters' precision; the speed is not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from mbridge_fsdp_ckpt.patching import Patches
from testing.kernels import replace_cuda_only_kernels

_MAMBA = "megatron.core.ssm.mamba_mixer"
_DELTA_NET = "megatron.core.ssm.gated_delta_net"


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Let the real modules of Transformer Engine and of Megatron's Mamba and Gated DeltaNet run on CPU ranks."""
    from megatron.core.extensions import transformer_engine as megatron_te
    from transformer_engine import pytorch as te

    norm = megatron_te.TENorm.__new__
    replace_cuda_only_kernels()
    patches = Patches()
    try:
        patches.set(megatron_te.TENorm, "__new__", norm)  # the real norm; its forward pass is below
        patches.set(te.RMSNorm, "forward", _rms_norm)
        patches.set(te.Linear, "forward", _linear)
        patches.set(te.LayerNormLinear, "forward", _norm_and_linear)
        patches.set(te.GroupedLinear, "forward", _grouped_linear)
        patches.set(te.DotProductAttention, "forward", _attention)
        _replace_delta_rule(patches)
        _replace_mamba(patches)
        yield
    finally:
        patches.undo()


def _rms_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return _normalized(hidden, self.weight, self.eps, self.zero_centered_gamma)


def _normalized(hidden: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    values, scale = hidden.float(), weight.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * (1 + scale if zero_centered else scale)).to(hidden.dtype)


def _linear(self: Any, hidden: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    return _parallel(self, hidden)


def _norm_and_linear(self: Any, hidden: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    assert self.normalization == "RMSNorm"
    assert not self.return_layernorm_output
    return _parallel(self, _normalized(hidden, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


def _parallel(module: Any, hidden: torch.Tensor) -> Any:
    """What Transformer Engine's linear layers communicate, by Megatron's differentiable collectives."""
    from megatron.core.tensor_parallel import mappings

    group, parallel = module.tp_group, module.tp_size > 1
    if parallel and module.parallel_mode == "column":
        if module.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=group)
    bias = module.bias if module.apply_bias else None
    result = F.linear(hidden, module.weight, bias if module.parallel_mode != "row" else None)
    if parallel and module.parallel_mode == "row":
        if module.sequence_parallel:
            result = mappings.reduce_scatter_to_sequence_parallel_region(result, group=group)
        else:
            result = mappings.reduce_from_tensor_model_parallel_region(result, group=group)
    if module.parallel_mode == "row" and bias is not None:
        result = result + bias
    return (result, module.bias) if module.return_bias else result


def _grouped_linear(
    self: Any, hidden: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
) -> torch.Tensor:
    assert not self.use_bias
    assert self.tp_size == 1, "Megatron communicates itself around its experts"
    counts = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
    weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
    parts = zip(hidden.split(counts), weights, strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def _attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    attn_mask_type: str = "causal",
    qkv_format: str = "sbhd",
) -> torch.Tensor:
    """Causal attention of [sequence, batch, heads, channels]; under context parallelism every rank gathers the keys."""
    assert attn_mask_type in ("causal", "padding_causal"), attn_mask_type
    assert qkv_format == "sbhd", qkv_format
    positions = _positions(query.shape[0], self.cp_group)
    key, value = (_whole_sequence(tensor, self.cp_group) for tensor in (key, value))
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhc,tbhc->bhst", query.float(), key.float()) * self.unfused_attention.softmax_scale
    later = torch.arange(key.shape[0]) > positions[:, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhc->sbhc", weights, value.float()).to(query.dtype).flatten(2)


def _positions(length: int, group: ProcessGroup | None) -> torch.Tensor:
    """Of a rank's tokens in the sequence: rank r of n has the parts r and 2n - 1 - r of 2n."""
    if group is None or group.size() == 1:
        return torch.arange(length)
    half, last = length // 2, 2 * group.size() - 1
    return torch.cat([torch.arange(half) + half * part for part in (group.rank(), last - group.rank())])


def _whole_sequence(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is None or group.size() == 1:
        return tensor
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    parts = gather_from_sequence_parallel_region(tensor, group=group).chunk(2 * group.size())
    return torch.cat([*parts[::2], *reversed(parts[1::2])])  # rank r brought the parts r and 2n - 1 - r


def _replace_delta_rule(patches: Patches) -> None:
    """Megatron's own torch versions, which `deterministic_mode` would choose."""
    gdn = importlib.import_module(_DELTA_NET)
    if hasattr(gdn, "gdn"):  # Megatron-Core 0.18 has one module of what is a package since 0.19
        gdn = gdn.gdn
    patches.set(gdn, "chunk_gated_delta_rule", gdn.torch_chunk_gated_delta_rule)
    patches.set(gdn, "causal_conv1d", _fla_convolution)


def _fla_convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, **_: Any) -> Any:
    """Stands in for `fla.modules.convolution.causal_conv1d`: [batch, sequence, channels]."""
    assert activation == "silu"
    return _causal_convolution(x, weight, bias), None


def _causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    width = weight.shape[-1]
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    mixed: torch.Tensor = F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]))
    return mixed.transpose(1, 2)


def _replace_mamba(patches: Patches) -> None:
    mixer = importlib.import_module(_MAMBA)
    if not mixer.HAVE_MAMBA_SSM:
        patches.set(mixer, "HAVE_MAMBA_SSM", True)
        patches.set(mixer, "ExtendedRMSNorm", ExtendedRMSNorm)
        patches.set(mixer, "mamba_split_conv1d_scan_combined", _scan)


class ExtendedRMSNorm(torch.nn.Module):
    """Stands in for mamba_ssm's `RMSNorm` by groups of channels; its name is what Megatron-FSDP looks at."""

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, device: Any, dtype: torch.dtype, norm_before_gate: bool
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        grouped = hidden.float().unflatten(-1, (-1, self.group_size))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        scaled: torch.Tensor = grouped.flatten(-2) * self.weight.float()
        return scaled.to(hidden.dtype)


def _scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    *,
    D: torch.Tensor,  # noqa: N803  the kernel's own name
    headdim: int,
    ngroups: int,
    activation: str,
    **_: Any,
) -> torch.Tensor:
    """Stands in for mamba_ssm's `mamba_split_conv1d_scan_combined`: the state-space model as masked attention."""
    assert activation == "silu"
    heads = a.shape[0]
    inner = heads * headdim
    state = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    x, b, c = _causal_convolution(xbc, conv1d_weight, conv1d_bias).split([inner, ngroups * state, ngroups * state], -1)
    x = x.unflatten(-1, (heads, headdim)).float()
    b, c = (part.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=-2).float() for part in (b, c))
    steps = F.softplus(dt.float() + dt_bias)  # [batch, sequence, heads]
    decayed = torch.cumsum(steps * a, dim=1)
    length = x.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, :, :, None]
    decay = (decayed[:, :, None] - decayed[:, None]).masked_fill(later, float("-inf")).exp()
    y = torch.einsum("bihs,bjhs,bijh,bjh,bjhp->bihp", c, b, decay, steps, x) + D.float()[:, None] * x
    gated: torch.Tensor = y.flatten(2) * F.silu(z.float())
    return gated.to(zxbcdt.dtype)

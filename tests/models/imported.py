# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Models that Bridge imports from Hugging Face, with Transformer Engine's own modules, under Megatron-FSDP.

Each function runs on every rank.  What a load must give is not read from the checkpoint's writer: Bridge imports the
same Hugging Face files into a second, plain model in the loading layout, and cuts them for tensor and expert
parallelism itself.  Optimizer state follows the weights (`SLOTS`), so that elements in the wrong place show there too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from testing.kernels import let_mamba_be_built
from testing.models import adam
from tests.families.reference import SLOTS, STEPS, Layout
from tests.upstream import is_before


@dataclass(frozen=True)
class Findings:
    """What a load gave on one rank; every name is one in the model without its wrappers.

    Args:
        tensors: Parameters and persistent buffers of Bridge's own import.
        compared: Those that the loaded model has too.
        held: Those of which this rank has elements.
        same_before: Those that were right before the load; an empty shard always is.
        different: Those that are wrong after it.
        different_state: Optimizer state that is wrong.
        different_compute_weights: Parameters of which the model would compute with other values.
        exported: By Hugging Face name, whether Bridge's export gives the imported tensor back.
    """

    tensors: set[str]
    compared: set[str]
    held: set[str]
    same_before: set[str]
    different: list[str]
    different_state: list[str]
    different_compute_weights: list[str]
    exported: dict[str, bool] | None


def is_supported(source: str) -> bool:
    """Whether the installed Bridge has a bridge for this checkpoint's architecture.

    `AutoBridge.can_handle` of 0.5 says so of every causal language model; and its bridge for Qwen3.5-VL-MoE does not
    find experts that transformers wrote one by one.
    """
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    [architecture] = AutoConfig.from_pretrained(source).architectures
    if architecture == "Qwen3_5MoeForConditionalGeneration" and is_before("megatron-bridge", "0.6"):
        return False
    return architecture in AutoBridge.list_supported_models()


def save_imported(source: str, directory: str, layout: Layout) -> int:
    """Import, wrap, save; the number of parameters."""
    model, optimizer = _sharded(source, layout, load=True)
    weights = dict(_live_parameters(model))
    state = _optimizer_state(optimizer)
    for weight in weights.values():
        state[weight] = _state_for(weight)
    mbridge_fsdp_ckpt.save(directory, model=model, optimizer=optimizer, values={"iteration": 1})
    return len(weights)


def load_and_compare(source: str, directory: str, layout: Layout, again: str, export: bool) -> Findings:
    """Load into a model initialised otherwise; compare with Bridge's own import into this layout; save again."""
    model, optimizer = _sharded(source, layout, load=False)
    reference = dict(_tensors(build(source, layout, load=True, wrap=False)))
    before = _compare(model, reference)
    loaded = mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer)
    assert loaded.values["iteration"] == 1
    after = _compare(model, reference)
    found = Findings(
        tensors=set(reference),
        compared=set(after),
        held={name for name, tensor in _tensors(model.module) if _local(tensor).numel()},
        same_before={name for name, same in before.items() if same},
        different=sorted(name for name, same in after.items() if not same),
        different_state=sorted(_compare_state(model, optimizer, reference)),
        different_compute_weights=sorted(_compare_compute_weights(model, reference)),
        exported=_export(source, model) if export else None,
    )
    mbridge_fsdp_ckpt.save(again, model=model, optimizer=optimizer, values=dict(loaded.values))
    return found


def _sharded(source: str, layout: Layout, *, load: bool) -> tuple[Any, Any]:
    model = build(source, layout, load=load, wrap=True)
    return model, adam(model)


def build(source: str, layout: Layout, *, load: bool, wrap: bool) -> Any:
    """A model through AutoBridge; unwrapped, it holds the parameters of one tensor-parallel rank."""
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    let_mamba_be_built()
    provider = AutoBridge.from_hf_pretrained(source, torch_dtype=torch.bfloat16).to_megatron_provider(load_weights=load)
    provider.tensor_model_parallel_size, provider.expert_model_parallel_size = layout.tensor, layout.expert
    provider.expert_tensor_parallel_size, provider.context_parallel_size = layout.expert_tensor, layout.context
    provider.sequence_parallel = layout.tensor > 1
    provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
    provider.gradient_accumulation_fusion = False
    provider.make_vocab_size_divisible_by = 8  # the same vocabulary in every layout
    provider.moe_shared_expert_overlap = False
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=0, num_distributed_optimizer_instances=layout.instances)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=layout.strategy,
        num_distributed_optimizer_instances=layout.instances,
        outer_dp_sharding_strategy=layout.outer,
    )
    chunks = provider.provide_distributed_model(
        ddp_config=config if wrap else None, use_megatron_fsdp=wrap, wrap_with_ddp=wrap
    )
    assert len(chunks) == 1
    return chunks[0]


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, by their names in the model without its wrappers."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            yield _plain(name), tensor


def _plain(name: str) -> str:
    return re.sub(r"^(module\.)+", "", name)


def _live_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in _tensors(model.module):
        if isinstance(tensor, torch.nn.Parameter):
            yield name, tensor


def _compare(model: Any, reference: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Whether this rank's shard of every tensor is, bit for bit, what the reference has there."""
    return {
        name: torch.equal(_local(tensor), _shard_of(reference[name], tensor)) for name, tensor in _tensors(model.module)
    }


def _compare_state(model: Any, optimizer: Any, reference: dict[str, torch.Tensor]) -> Iterator[str]:
    state = _optimizer_state(optimizer)
    for name, parameter in _live_parameters(model):
        weight, held = _shard_of(reference[name], parameter), state.get(parameter, {})
        if not weight.numel() and not held:
            continue
        if sorted(held) != sorted([*SLOTS, "step"]) or float(held["step"]) != STEPS:
            yield f"{name}: {sorted(held)}"
        else:
            yield from (f"{name}.{s}" for s, value in SLOTS.items() if not torch.equal(_local(held[s]), value(weight)))


def _compare_compute_weights(model: Any, reference: dict[str, torch.Tensor]) -> Iterator[str]:
    """What the forward pass reads, or gathers from: Megatron-FSDP's buffers of model weights."""
    buffer = model.module.param_and_grad_buffer
    for group in buffer.parameter_groups:
        weights = group.model_weight_buffer
        for item, parameter in enumerate(group.params):
            name = _plain(buffer.param_to_name[parameter])
            expected = reference[name].detach().reshape(-1)
            if weights is None:
                held = _local(parameter)
            else:
                held = weights.get_item(item).detach()
                expected = expected[slice(*weights.locate_item_in_global_item(item))]
            if not torch.equal(held, expected.to(held.dtype)):
                yield name


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local.reshape(-1)


def _shard_of(whole: torch.Tensor, live: Any) -> torch.Tensor:
    """The part of a tensor-parallel rank's tensor that Megatron-FSDP gave to this rank, as main weight."""
    flat = whole.detach().reshape(-1)
    part: slice = getattr(live, "megatron_fsdp_slice", None) or slice(0, flat.numel())
    return flat[part].to(live.dtype)


def _optimizer_state(optimizer: Any) -> Any:
    inner = optimizer.optimizer
    assert type(inner) is torch.optim.AdamW, type(inner)
    return inner.state


def _state_for(weight: Any) -> dict[str, torch.Tensor]:
    """As torch's AdamW would have it; nothing where this rank has no elements, for those have no gradient."""
    if not _local(weight).numel():
        return {}
    state = {"step": torch.tensor(STEPS)}
    for name, value in SLOTS.items():
        state[name] = torch.zeros_like(weight)
        _local(state[name]).copy_(value(_local(weight)))
    return state


def _export(source: str, model: Any) -> dict[str, bool]:
    """Whether each tensor that Bridge exports from the loaded model is the one it was imported from."""
    from megatron.bridge import AutoBridge
    from safetensors.torch import load_file

    original = load_file(str(Path(source) / "model.safetensors"))
    bridge = AutoBridge.from_hf_pretrained(source, torch_dtype=torch.bfloat16)
    with gloo_gathers_uneven():
        exported = dict(bridge.export_hf_weights([model], cpu=True, show_progress=False))
    found = {name: name in exported and _same_values(exported[name], tensor) for name, tensor in original.items()}
    return found | dict.fromkeys(exported.keys() - original.keys(), False)


def _same_values(exported: torch.Tensor, original: torch.Tensor) -> bool:
    return torch.equal(exported.float(), original.float())  # some are kept in fp32; every bf16 number is one in fp32


@contextmanager
def gloo_gathers_uneven() -> Iterator[None]:
    """Bridge's export gathers shards of different sizes, which NCCL can."""
    with patch.object(dist, "all_gather", _all_gather_uneven):
        yield


def _all_gather_uneven(tensors: list[torch.Tensor], own: torch.Tensor, group: Any = None, **_: Any) -> None:
    """NCCL gathers tensors of different sizes, as Megatron-FSDP does with its shards; gloo does not."""
    for rank, tensor in zip(dist.get_process_group_ranks(group or dist.group.WORLD), tensors, strict=True):
        if rank == dist.get_rank():
            tensor.copy_(own)
        if tensor.numel():
            dist.broadcast(tensor, rank, group=group)

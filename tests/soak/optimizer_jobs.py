# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Jobs of the matrix of optimizers: tiny real models under Megatron-FSDP, each with an optimizer of the list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mbridge_fsdp_ckpt.upstream_fixes import corrections
from testing import models
from testing.kernels import replace_cuda_only_kernels
from testing.models import SEQUENCE, Recipe, Trainable
from tests.soak.optimizer_cases import FROZEN, KINDS, OWN_STEP, TOKENS, Groups, Job

LAYERS = 2
SAVES, LOADS = 1, 2
"""Seeds of jobs that save, and of those that load: nothing is the same by chance."""

_OF_MEGATRON = ("params", "is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr", "max_lr")
_LOSS_SCALES = {SAVES: (2048.0, 3), LOADS: (512.0, 0)}
"""And how many steps went well with it."""
_NUMBERS = {SAVES: ((1e-2, 0.1), (5e-3, 0.0)), LOADS: ((3e-3, 0.05), (2e-3, 0.02))}
"""Learning rate and weight decay of matrices and of norms."""


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody's own: one moment, no counter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The sign of an average, and then another average."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = (average * first + parameter.grad * (1 - first)).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update * -group["lr"])
                average.mul_(second).add_(parameter.grad * (1 - second))


def _masters(groups: Any) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(groups, lr=1e-2, weight_decay=0.1, master_weights=True)


_REPLACED: dict[str, Callable[[Any], Any]] = {
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Lion": lambda groups: Lion(groups, lr=1e-2),
    "FusedAdam with masters": _masters,
}


def built(kind: str, job: Job, seed: int) -> Trainable:
    """The job before its first step; Megatron's groups are made anew where the tensor-parallel size is another."""
    from megatron.core import parallel_state

    replace_cuda_only_kernels()
    corrections.apply(__name__)
    initialized = parallel_state.model_parallel_is_initialized()
    if initialized and parallel_state.get_tensor_model_parallel_world_size() != job.tensor:
        parallel_state.destroy_model_parallel()
    recipe = Recipe(layers=LAYERS, vocabulary=job.vocabulary, tensor=job.tensor, **KINDS[kind].recipe)
    trainable = models.build(recipe, seed, change=_freeze if job.frozen else None)
    inner = trainable.optimizer.optimizer
    if KINDS[kind].replaced:
        groups = [{name: group[name] for name in _OF_MEGATRON} for group in inner.param_groups]
        inner = trainable.optimizer.optimizer = _REPLACED[KINDS[kind].replaced](groups)
    _set_numbers(inner, job, seed)
    inner.param_groups = _regrouped(inner.param_groups, job.groups)
    if job.names:
        names = {id(parameter): name for name, parameter in parameters(trainable)}
        for group in inner.param_groups:
            group["param_names"] = [f"{names[id(parameter)]}, seed {seed}" for parameter in group["params"]]
    if hasattr(inner, "sub_optimizers"):
        inner._init_sub_optimizers()
    return trainable


def _freeze(module: Any) -> None:
    [frozen] = [parameter for name, parameter in module.named_parameters() if name.endswith(FROZEN)]
    frozen.requires_grad = False


def _set_numbers(inner: Any, job: Job, seed: int) -> None:
    for group, (lr, decay) in zip(inner.param_groups, _NUMBERS[seed], strict=True):
        first_lr, first_decay = _NUMBERS[seed][0]
        group["lr"], group["weight_decay"] = (first_lr, first_decay) if job.alike else (lr, decay)
        group["wd_mult"] = 1.0 if job.alike else group["wd_mult"]
        if job.extra == "initial_lr":
            group["initial_lr"] = 0.125


def _regrouped(groups: list[dict[str, Any]], how: Groups) -> list[dict[str, Any]]:
    matrices, norms = groups
    half = len(matrices["params"]) // 2
    if how == "split":
        parts = matrices["params"][:half], matrices["params"][half:]
        return [*({**matrices, "params": part} for part in parts), norms]
    if how == "one":
        return [{**matrices, "params": [*matrices["params"], *norms["params"]]}]
    if how == "reordered":
        return [{**group, "params": group["params"][::-1]} for group in (norms, matrices)]
    return groups


def parameters(trainable: Trainable) -> list[tuple[str, Any]]:
    """What the optimizer updates, and what is frozen, by name."""
    state = trainable.model.module.state_dict(keep_vars=True)  # puts the distributed parameters in place
    return [(key.removeprefix("module."), p) for key, p in state.items() if isinstance(p, torch.nn.Parameter)]


def made_special(trainable: Trainable, extra: str, seed: int) -> None:
    """What some history leaves, just before a save or load; `without_scale` undoes that of training in fp16."""
    if extra == "loss scale":
        trainable.optimizer.grad_scaler = _scaler(*_LOSS_SCALES[seed])
    inner = trainable.optimizer.optimizer
    optimizers = getattr(inner, "sub_optimizers", [inner])
    of_parameter = getattr(inner, "param_to_inner_param", {})
    for name, parameter in parameters(trainable):
        own = of_parameter.get(parameter, parameter)
        for state in (each.state[own] for each in optimizers if own in each.state):
            if extra == "int64 step":
                state["step"] = torch.tensor(2, dtype=torch.int64)
            elif extra == "a step of its own" and name == OWN_STEP:
                state["step"] = torch.ones_like(state["step"])


def _scaler(scale: float, went_well: int) -> Any:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scaler = DynamicGradScaler(scale, 1.0, 2.0, 0.5, growth_interval=10, hysteresis=2)
    scaler._growth_tracker = went_well
    return scaler


def without_scale(trainable: Trainable) -> None:
    """Megatron's cannot unscale gradients of shards that Megatron-FSDP left empty: no step is made with one."""
    trainable.optimizer.grad_scaler = None


def train(trainable: Trainable, steps: range) -> list[float]:
    """Steps on batches that depend on their number alone; the mean losses over all ranks.

    Padding of the vocabulary takes no part in the loss: training is the same whatever the padding is.
    """
    return [_step(trainable, number) for number in steps]


def _step(trainable: Trainable, number: int) -> float:
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    generator = torch.Generator().manual_seed(7_000 + number)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    tokens = torch.randint(0, TOKENS, (4, SEQUENCE + 1), generator=generator)
    own = tokens.chunk(ranks)[rank].cuda()
    trainable.model.module.is_last_microbatch = True
    trainable.model.zero_grad_buffer()
    trainable.optimizer.zero_grad()
    positions = torch.arange(SEQUENCE).cuda().expand(own.shape[0], -1)
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).cuda()
    mask = future[None, None].expand(own.shape[0], 1, -1, -1)
    logits = gather_from_tensor_model_parallel_region(trainable.model(own[:, :-1], positions, mask))
    loss = F.cross_entropy(logits[..., :TOKENS].float().flatten(0, 1), own[:, 1:].flatten())
    loss.backward()
    finalize_model_grads([trainable.model])
    trainable.optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()

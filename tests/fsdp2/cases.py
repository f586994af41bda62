# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do: train, save, load elsewhere, resume."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live.readers.choice import register_reader, unregister_reader
from mbridge_fsdp_ckpt.live.readers.dtensor import DTensorReader
from mbridge_fsdp_ckpt.live.readers.holders import Holders
from tests.fsdp2.models import Layout, Model, build, held, optimizer_of, train


def megatron_is_there() -> bool:
    """Whether this process could import Megatron-Core."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def save(directory: str, layout: Layout, name: str, *, beside: bool = False) -> tuple[Any, list[float]]:
    """What is saved after two steps, and the losses of two more."""
    model = build(layout, seed=1)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(2))
    saved = held(model, optimizer)
    if not beside:
        mbridge_fsdp_ckpt.save(directory, model=model, optimizer=optimizer, values={"step": 2})
        return saved, train(model, optimizer, range(2, 4))
    handle = mbridge_fsdp_ckpt.async_save(directory, model=model, optimizer=optimizer, values={"step": 2})
    losses = train(model, optimizer, range(2, 4))
    handle.result()
    return saved, losses


def load(directory: str, layout: Layout, name: str, *, shared: bool = False) -> tuple[Any, list[float], Any]:
    """What another model holds once it is loaded, the losses of two steps, and the values."""
    model = build(layout, seed=2)
    optimizer = optimizer_of(name, model)
    with torch.no_grad():
        model(torch.ones(1, model.ignored.shape[1]))  # what is gathered here is old when the load is done
    settings = mbridge_fsdp_ckpt.Settings(share_reads="always" if shared else "never")
    loaded = mbridge_fsdp_ckpt.load(directory, model=model, optimizer=optimizer, settings=settings)
    return held(model, optimizer), train(model, optimizer, range(2, 4)), dict(loaded.values)


def holders_of_equal_meshes() -> list[tuple[int, ...]]:
    """Who holds a norm's weight on the data-parallel dimension of one mesh, where tensors lie on an equal one."""
    one, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")) for _ in range(2))
    holders = Holders([one["data"], other["data", "tensor"]])
    return [holders.of(one["data"], []), holders.of(one["data"], [0]), holders.all]


def _state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What plain DCP saves and loads in place."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def save_plainly(directory: str, layout: Layout, name: str) -> Any:
    """What plain DCP saves after two steps."""
    model = build(layout, seed=1)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(2))
    saved = held(model, optimizer)
    dcp.save({**_state_of(model, optimizer), "step": 2, "schedule": {"last": [0.5, "x"]}}, checkpoint_id=directory)
    return saved


def load_plainly(directory: str, layout: Layout, name: str) -> tuple[Any, list[Any]]:
    """What plain DCP loads, every name of `get_state_dict` that is in the checkpoint, and the param groups."""
    model = build(layout, seed=2)
    optimizer = optimizer_of(name, model)
    state = _state_of(model, optimizer)
    _fill_with_nan(state)
    dcp.load(state, checkpoint_id=directory, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return held(model, optimizer), state["optimizer"]["param_groups"]


def keys_of_plain(directory: str) -> list[str]:
    """The keys that plain DCP finds in a checkpoint."""
    return sorted(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)


def _fill_with_nan(state: Any) -> None:
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else [state]
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                local = value.to_local() if isinstance(value, DTensor) else value
                local.detach().fill_(float("nan"))
        elif isinstance(value, dict | list):
            _fill_with_nan(value)


def load_weights(directory: str, layout: Layout) -> tuple[Any, list[str]]:
    """Weights after a load of weights alone, and the state that the optimizer has then."""
    model = build(layout, seed=2)
    optimizer = optimizer_of("AdamW", model)
    mbridge_fsdp_ckpt.load_weights(directory, model=model, optimizer=optimizer)
    found = held(model, optimizer)
    return found, [name for name in found if not name.startswith("model.")]


class ByTheName:
    """A reader of somebody's own: DTensors of a wrapper that has the model in an attribute."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = model


def save_by_a_reader_of_ones_own(directory: str) -> Any:
    """What a model saves that another reader finds, and which error says what readers there are where none does."""
    model = build(Layout(), seed=1)
    optimizer = optimizer_of("AdamW", model)
    train(model, optimizer, range(1))
    errors = []
    for strange in (ByTheName(model), torch.nn.Linear(2, 2)):
        try:
            mbridge_fsdp_ckpt.save(directory, model=strange, optimizer=optimizer)
        except CheckpointError as error:
            errors.append(str(error))
    register_reader("a wrapper", lambda found: DTensorReader(found.inner) if isinstance(found, ByTheName) else None)
    try:
        mbridge_fsdp_ckpt.save(directory, model=ByTheName(model), optimizer=optimizer)
    finally:
        unregister_reader("a wrapper")
    return held(model, optimizer), errors


def refused() -> dict[str, str]:
    """By what is wrong with a model, the error of a save."""
    found = {}
    for what, spoil in _SPOILT.items():
        model = build(Layout(), seed=1)
        values = spoil(model)
        try:
            optimizer = optimizer_of("SGD", model)
            mbridge_fsdp_ckpt.save("/nonexistent/never", model=model, optimizer=optimizer, values=values)
        except CheckpointError as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def _of_another_shape(model: Model) -> None:
    block: Any = model.blocks[0]
    weight = block.up.weight
    weight._local_tensor = weight._local_tensor[:-1]


def _partial(model: Model) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.ignored = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False))


def _made_by_a_hook(model: Model) -> None:
    def double(module: Any, state: dict[str, Any], *rest: Any) -> None:
        state["ignored"] = state["ignored"] * 2

    model.register_state_dict_post_hook(double)  # type: ignore[no-untyped-call]


_SPOILT: dict[str, Callable[[Model], Any]] = {
    "a shard of another shape": _of_another_shape,
    "a partial sum": _partial,
    "a tensor that a hook made": _made_by_a_hook,
    "a value of the name of param groups": lambda model: {"optimizer": 1},
}

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 state of Transformer Engine's modules, as tensors and plain values instead of the pickled `_extra_state`.

Only delayed scaling has state.  It is read from and written to `fp8_meta` directly: Transformer Engine's own
`set_extra_state` takes a pickle, which it refuses by default.  This is the one file that knows that private state
(2.20, `pytorch/module/base.py` and `pytorch/quantization.py`):

    fp8_meta["recipe"]                          a `DelayedScaling`
    fp8_meta["scaling_fwd"], ["scaling_bwd"]    each with
        scale           (n,)          n = 3 a GEMM forward: input, weight, output; 2 backward: grad output, grad input
        amax_history    (length, n)   row 0 is being gathered; its maximum over the reduction group becomes history

All columns of one GEMM come before those of the next.  (Megatron-Core 0.19 cuts the state of `TEGroupedLinear` as if
all inputs came first, then all weights: there experts that move to another rank get the columns of others.)

Saved and live state meet like this; all but the first case is said in the log:

    saved, and the model scales with delay          restored, before the first forward pass as well as after it
    saved, the model has no FP8 or another format   ignored
    not saved, but the model scales with delay      starts fresh, as without a checkpoint
    `CustomRecipe`, fused operations of `te.ops`    not saved: their state is kept elsewhere
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mbridge_fsdp_ckpt.errors import LayoutError
from mbridge_fsdp_ckpt.live.fp8.shapes import TENSORS, WAYS, is_regular, shapes_of
from mbridge_fsdp_ckpt.versions import require

Modules = Iterable[tuple[str, nn.Module]]
"""Names and modules, as `named_modules` gives them."""

State = dict[str, Any]
"""The state of one key: the recipe's fields, and tensors by name."""

OnDisk = Callable[[str], str]
"""A parameter's name on this rank -> its name on disk, numbered over all ranks."""

_RECIPE = "DelayedScaling"
_GEMMS = {"LayerNormMLP": 2, "DotProductAttention": 3}  # all others have one; grouped experts say it themselves
_SCALING = frozenset({"scaling_fwd", "scaling_bwd"})
_log = logging.getLogger(__name__)


def collect(modules: Modules, on_disk: OnDisk = str) -> dict[str, State]:
    """FP8 state by key, copied to the host; nothing for modules that have none.

    Args:
        modules: Names and modules.
        on_disk: Keys follow those of parameters; a module of grouped experts gives one key an expert.

    Raises:
        UnsupportedVersionError: This Transformer Engine's internals may differ.
    """
    states, left_out = dict[str, State](), []
    for name, module in modules:
        if _has_state(module):
            require("FP8 state")
            keys = _keys(name, module, on_disk)
            states.update(zip(keys, _split(_typed(module), len(keys)), strict=True))
        elif _has_something(module):
            left_out.append(name)
    _tell(left_out, "FP8 state of %d modules is not saved, such as that of %s")
    return states


def may_have_some(modules: Iterable[nn.Module]) -> bool:
    """Whether there is state in one of them, or something that `collect` tells of.  All are asked in every save."""
    return any(
        _has_something(module) for module in modules if "fp8_meta" in vars(module) or "_fp8_metas" in vars(module)
    )


def replicas_agree(module: nn.Module, ranks: int) -> bool:
    """Whether amaxes are reduced over at least `ranks` ranks, so that all replicas of a module hold the same.

    Megatron reduces over all ranks of a pipeline stage, experts too: replicas of an expert have it at the same place of
    their module, and get the same maximum there.  With `tp_only_amax_red` data-parallel ranks have amaxes of their own.
    """
    meta = _meta(module)
    alone = ranks == 1 or not _has_state(module)
    return alone or (bool(meta["recipe"].reduce_amax) and dist.get_world_size(meta["fp8_group"]) >= ranks)


def open_rows(states: Mapping[str, State]) -> dict[str, dict[str, torch.Tensor]]:
    """The rows that wait for their reduction, and differ by rank: empty after a training step, not after evaluation."""
    rows = {key: {way: state[f"amax_history_{way}"][0] for way in WAYS} for key, state in states.items()}
    return {key: row for key, row in rows.items() if any(bool(tensor.any()) for tensor in row.values())}


def with_open_rows(key: str, state: State, rows: Iterable[Any]) -> State:
    """Checked state with the maximum of several ranks' open rows, which is what their reduction would have found.

    Raises:
        LayoutError: A row does not fit.
    """
    histories = {way: state[f"amax_history_{way}"].clone() for way in WAYS}
    for row in rows:
        if shapes_of(row) != {way: tuple(history[0].shape) for way, history in histories.items()}:
            raise _misfit("open rows as wide as the history", row, key)
        for way, history in histories.items():
            history[0] = torch.maximum(history[0], row[way])
    return {**state, **{f"amax_history_{way}": history for way, history in histories.items()}}


@dataclasses.dataclass(frozen=True, slots=True)
class Restoration:
    """Checked state and the module that it fits."""

    module: Any
    recipe: Any
    state: State

    def apply(self) -> None:
        """Do what `set_extra_state` would do.  Weights that are stored in FP8 must be quantized afterwards."""
        meta = self.module.fp8_meta
        if not _has_state(self.module):
            meta["num_gemms"] = len(self.state["scale_fwd"]) // WAYS["fwd"]
            meta["fp8_max_fwd"], meta["fp8_max_bwd"] = self.recipe.fp8_format.value
            meta["recipe"] = self.recipe  # the first forward pass puts its own there, and keeps the tensors
            self.module.init_fp8_meta_tensors(self.recipe)
        meta["fp8_checkpoint"] = True
        meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
        live = _live_tensors(self.module)
        with torch.no_grad():  # in place: quantizers and the reduction hold views of these tensors
            for way in WAYS:
                live[f"scale_{way}"].copy_(self.state[f"scale_{way}"])
                history = live[f"amax_history_{way}"].zero_()
                saved = self.state[f"amax_history_{way}"][: len(history)]
                history[: len(saved)].copy_(saved)


def find_restorations(modules: Modules, saved: Mapping[str, State], on_disk: OnDisk = str) -> list[Restoration]:
    """Find and check what each module shall get.  Changes nothing.

    Args:
        modules: Names and modules of the live model.
        saved: What `collect` returned, of all ranks; keys without a module here are left alone.
        on_disk: Gives the key of a module, as it does of parameters.

    Raises:
        LayoutError: The state is malformed, does not fit its module, or is that of some experts of a module only.
        UnsupportedVersionError: This Transformer Engine's internals may differ.
    """
    restorations, ignored, fresh = [], [], []
    for name, module in modules:
        keys = _keys(name, module, on_disk) if _meta(module) else []
        found = {key: saved[key] for key in keys if key in saved}
        live = _live_format(module) if keys else ""
        if found and live != "":
            state = _merge(keys, {key: check(key, typed) for key, typed in found.items()})
            _check_fits(keys[0], module, state)
            if live in (None, state["recipe"].get("fp8_format")):
                require("FP8 state")
                restorations.append(Restoration(module, _recipe_from(keys[0], state), state))
                continue
        ignored += [name] if found else []
        fresh += [name] if live else []
    _tell(ignored, "saved FP8 state of %d modules is ignored, since they don't scale with delay in its format: %s, ...")
    _tell(fresh, "the FP8 scales of %d modules start fresh, since no state of theirs fits: %s, ...")
    return restorations


def names(modules: Modules, on_disk: OnDisk = str) -> list[str]:
    """Keys of all modules that have FP8 state or may get some."""
    return [key for name, module in modules if _meta(module) for key in _keys(name, module, on_disk)]


def check(key: str, typed: object) -> State:
    """One key's state, if it is what `collect` makes.

    Raises:
        LayoutError: It is not.
    """
    fields = dict(typed) if isinstance(typed, Mapping) else {}
    recipe = fields.pop("recipe", None)
    if not isinstance(recipe, Mapping) or recipe.get("class") != _RECIPE:
        raise _misfit(f"FP8 state with a {_RECIPE} recipe", f"{type(typed).__name__} with {recipe}", key)
    if not is_regular(fields):
        raise _misfit("float32 scales and histories, 3 columns a GEMM forward and 2 backward", fields, key)
    return {"recipe": recipe, **fields}


def _typed(module: Any) -> State:
    recipe: Any = _meta(module)["recipe"]
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    plain = {name: value.name if isinstance(value, enum.Enum) else value for name, value in fields.items()}
    # a function as amax_compute_algo cannot be data; the first forward pass brings its own recipe, function and all
    plain = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | None)}
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _live_tensors(module).items()}
    return {"recipe": {**plain, "class": _RECIPE}, **tensors}


def _recipe_from(key: str, state: State) -> Any:
    from transformer_engine.common.recipe import DelayedScaling, Format

    fields = {name: value for name, value in state["recipe"].items() if name != "class"}
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(DelayedScaling)})
    try:
        if unknown:
            raise ValueError(f"unknown fields {unknown}")
        special = {"fp8_format": Format[fields["fp8_format"]], "amax_history_len": len(state["amax_history_fwd"])}
        return DelayedScaling(**{**fields, **special})
    except (KeyError, TypeError, ValueError, AssertionError) as error:  # pydantic's are ValueErrors
        raise _misfit(f"fields of a {_RECIPE} recipe", f"{type(error).__name__}: {error}", key) from error


def _split(state: State, parts: int) -> list[State]:
    columns = zip(*(state[name].chunk(parts, dim=-1) for name in TENSORS), strict=True)
    return [{"recipe": state["recipe"], **dict(zip(TENSORS, piece, strict=True))} for piece in columns]


def _merge(keys: list[str], states: Mapping[str, State]) -> State:
    first = next(iter(states.values()))
    for key in keys:
        state = states.get(key, {})
        if state.get("recipe") != first["recipe"] or shapes_of(state) != shapes_of(first):
            raise _misfit("alike FP8 state for every expert, or none", state, key)
    return {**first, **{name: torch.cat([states[key][name] for key in keys], dim=-1) for name in TENSORS}}


def _check_fits(key: str, module: Any, state: State) -> None:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    gemms = getattr(module, "num_gemms", next((n for name, n in _GEMMS.items() if name in kinds), 1))
    width = gemms * WAYS["fwd"]
    if not width == len(state["scale_fwd"]) == len(_live_tensors(module).get("scale_fwd", range(width))):
        raise _misfit(f"FP8 state of {gemms} GEMMs, here and in the checkpoint", state, key)


def _keys(name: str, module: Any, on_disk: OnDisk) -> list[str]:
    if ".experts." in name and isinstance(getattr(module, "num_gemms", None), int):
        weights = [on_disk(f"{name}.weight{gemm}").rpartition(".weight") for gemm in range(module.num_gemms)]
        return [f"{prefix}._extra_state{expert}" for prefix, _, expert in weights]
    return [on_disk(f"{name}._extra_state")]


def _meta(module: Any) -> dict[str, Any]:
    return vars(module).get("fp8_meta") or {}


def _live_tensors(module: Any) -> dict[str, torch.Tensor]:
    meta = _meta(module)
    if _SCALING.isdisjoint(meta):  # so it is without FP8: a save's call asks all modules
        return {}
    found = {name: getattr(meta.get(f"scaling_{name[-3:]}"), name[:-4], None) for name in TENSORS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _has_something(module: Any) -> bool:
    fused = vars(module).get("_fp8_metas")
    is_fused = bool(fused) and any(meta and meta["recipe"].delayed() for meta in fused.values())
    return is_fused or bool(_live_tensors(module))


def _has_state(module: Any) -> bool:
    """Whether there is state of the one known layout: attention may mix recipes."""
    recipe = _meta(module).get("recipe")
    return recipe is not None and bool(recipe.delayed()) and is_regular(_live_tensors(module))


def _live_format(module: Any) -> str | None:
    """The FP8 format a live module scales with delay in, "" where it does not, None where nothing tells.

    Until its first forward pass it is Megatron's configuration that tells.
    """
    recipe = _meta(module).get("recipe")
    config: Any = getattr(module, "config", None)
    if recipe is not None:
        return str(recipe.fp8_format.name) if recipe.delayed() else ""
    if not hasattr(config, "fp8"):
        return None
    kind = getattr(config, "fp8_recipe", None)
    return (config.fp8 or "").upper() if getattr(kind, "value", kind) == "delayed" else ""


def _tell(names: list[str], message: str) -> None:
    if names:
        _log.warning(message, len(names), names[0])


def _misfit(expected: str, found: object, key: str) -> LayoutError:
    text = found if isinstance(found, str) else f"{type(found).__name__} with {shapes_of(found)}"
    remedy = "Load a checkpoint of the same model, saved by this release."
    return LayoutError(expected=expected, found=text[:500], remedy=remedy, key=key)

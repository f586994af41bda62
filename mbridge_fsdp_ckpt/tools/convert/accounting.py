# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Both sides of a conversion by Bridge: every tensor of the Hugging Face model and of Megatron's has a counterpart.

Bridge gives random numbers to what the files lack, drops what it has no place for, and lets a narrower type overflow,
without a word.  Here parameters are NaN before an import, and reads of tensors are recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, KeyMismatchError, brief
from mbridge_fsdp_ckpt.loading.match import listed
from mbridge_fsdp_ckpt.patching import Patches

_STACKED = re.compile(r"(?<!shared_)experts\.(gate|up|down)\w*$")
"""Tensors that have all experts of a layer."""
_MADE_ANEW = "rotary_emb.inv_freq"
"""Tensors that some files have and every model computes."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embeddings.weight")
_OUTPUTS = ("lm_head.weight", "shared_head.head.weight")
"""Both may be there more than once: an output layer that is the embeddings, and those of multi-token prediction."""
_SHAPES = "tensors of the Hugging Face model in the shapes that its config.json asks for"
_PROJECTION = ".in_proj.weight"
"""What the projection into Mamba's, or Gated DeltaNet's, heads is called in Megatron."""


def check_files(bridge: Any) -> None:
    """Check that the Hugging Face model's files have what its index names.

    Raises:
        DamagedCheckpointError: One is missing, cannot be read, or lacks tensors.
    """
    from safetensors import safe_open

    source = getattr(bridge.hf_pretrained.state, "source", None)
    names: dict[str, list[str]] = {}
    for key, name in (getattr(source, "key_to_filename_map", None) or {}).items():
        names.setdefault(name, []).append(key)
    for name, keys in sorted(names.items()):
        path = Path(getattr(source, "path", "")) / name
        try:
            with safe_open(str(path), "pt") as file:
                missing = sorted(set(keys) - set(file.keys()))
        except Exception as error:  # safetensors has errors of its own, which it does not export
            found = brief(error) if path.exists() else "no such file"
            raise _incomplete(path, f"a file of {len(keys)} tensors", found) from error
        if missing:
            raise _incomplete(path, f"the {len(keys)} tensors that the index names", f"no {listed(missing)}")


def _incomplete(path: Path, expected: str, found: str) -> DamagedCheckpointError:
    remedy = "Download the Hugging Face model again: its files are not complete."
    return DamagedCheckpointError(expected=expected, found=found, remedy=remedy, key=str(path))


def fill(bridge: Any, model: Any, *, strict: bool) -> list[str]:
    """Fill a model from the Hugging Face model, by Bridge's own mappings.  All ranks call it.

    Args:
        bridge: Bridge's converter.
        model: What it built.
        strict: Whether every tensor of the files must have a place.

    Returns:
        Tensors of the files that have none.

    Raises:
        KeyMismatchError: A parameter was not filled, or a tensor has no place.
        DamagedCheckpointError: A tensor of the files has values that are no finite numbers.
        ConfigurationError: A tensor has a shape that Bridge cannot take, or a value does not fit the type.
    """
    tensors = dict(_to_be_filled(bridge, model))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    with _recorded(bridge, getattr(model.config, "num_moe_experts", None)) as read:
        _load(bridge, model, read)
    _check_filled(bridge, model, tensors, read)
    _check_columns(bridge, model, tensors, read)
    unread = _without_place(bridge.hf_pretrained.state.source, _on_all_ranks(read.shapes))
    if unread and strict:
        raise KeyMismatchError(
            expected="a place in the model for every tensor of the Hugging Face model",
            found=f"{len(unread)} without one: {listed(unread)}",
            remedy="--not-strict leaves them out. Nothing was written.",
        )
    return unread


@dataclass(slots=True)
class _Read:
    """Tensors that were read from the files.

    Args:
        shapes: Of all, by name.
        last: The same of those for the parameter that is being filled.
        not_finite: Those with a NaN or an infinite value.
        largest: Of the others, the largest magnitude of each.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, list[int]] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor."""
        is_new = name not in self.shapes
        self.last[name] = self.shapes[name] = list(tensor.shape)
        if is_new and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            low, high = (float(value) for value in tensor.aminmax())  # NaN if there is one
            if math.isfinite(low) and math.isfinite(high):
                self.largest[name] = max(-low, high)
            else:
                self.not_finite.add(name)


def _load(bridge: Any, model: Any, read: _Read) -> None:
    try:
        bridge.load_hf_weights([model])
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        shapes = [f"{name} {shape}" for name, shape in read.last.items()]
        raise _other_shapes(f"{brief(error)}, of {listed(shapes)}") from error


def _other_shapes(found: str, expected: str = _SHAPES) -> ConfigurationError:
    return ConfigurationError(
        expected=expected,
        found=found,
        remedy="Are its files, and config.json, of one model? Nothing was written.",
    )


def _check_filled(bridge: Any, model: Any, tensors: Mapping[str, torch.Tensor], read: _Read) -> None:
    """Check that every parameter has finite numbers.

    Raises:
        DamagedCheckpointError: A tensor of the files has others.
        KeyMismatchError: A parameter was not filled.
        ConfigurationError: A value does not fit the type.
    """
    own = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    not_finite, wrong = _on_all_ranks(read.not_finite), _on_all_ranks(own)
    if wrong and not_finite:
        raise DamagedCheckpointError(
            expected="finite numbers in the Hugging Face model's files",
            found=f"NaN or infinite values in {len(not_finite)} tensors: {listed(sorted(not_finite))}",
            remedy="The model itself has them: download it again, or use another one. Nothing was written.",
        )
    empty = [name for name in own if tensors[name].isnan().any()]
    absent = _on_all_ranks(empty)
    lacking = _on_all_ranks(_lacking(bridge, model, empty))
    if absent:
        source = f"no {listed(sorted(lacking))}, for " if lacking else ""
        raise KeyMismatchError(
            expected="a tensor of the Hugging Face model for every parameter",
            found=f"{source}{len(absent)} not filled: {listed(sorted(absent))}",
            remedy="Its files lack tensors. Nothing was written.",
        )
    if wrong:  # with what is infinite in the model's type alone
        largest = torch.finfo(tensors[own[0]].dtype).max if own else math.inf
        sources = _on_all_ranks(name for name, value in read.largest.items() if value > largest)
        raise ConfigurationError(
            expected="values that fit --torch-dtype",
            found=f"too large ones in {listed(sorted(sources))}, for {listed(sorted(wrong))}",
            remedy="Give --torch-dtype bfloat16 or float32. Nothing was written.",
        )


def _check_columns(bridge: Any, model: Any, tensors: Mapping[str, torch.Tensor], read: _Read) -> None:
    """Check what Bridge takes whatever its shape is: it views projections as heads, and cuts Mamba's parameters.

    Raises:
        ConfigurationError: A tensor has other columns than its parameter, or more rows.
    """
    matrices = [name for name, tensor in tensors.items() if tensor.dim() > 1]
    unlike = {
        f"{source} {read.shapes[source]}"
        for name, sources in _sources(bridge, model, matrices)
        if {"q", "k", "v"} <= sources.keys() or name.endswith(_PROJECTION)
        for source in sources.values()
        if source in read.shapes and read.shapes[source][-1] != tensors[name].shape[-1]
    }
    found = _on_all_ranks(unlike.union(_longer(bridge, model, tensors, read)))
    if found:
        raise _other_shapes(listed(sorted(found)))


def _longer(bridge: Any, model: Any, tensors: Mapping[str, torch.Tensor], read: _Read) -> Iterator[str]:
    """Convolutions and Mamba's projections with other rows: Bridge takes those it wants, and leaves the others."""
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size as tensor_size

    cut = [
        name for name, tensor in tensors.items() if tensor.dim() and ("conv1d" in name or name.endswith(_PROJECTION))
    ]
    for name, sources in _sources(bridge, model, cut):
        for source in sources.values():
            rows = tensors[name].shape[0]  # of a part, or of a copy: Gemma 4's audio tower is on every rank
            found = read.shapes.get(source, [rows])
            if len(sources) == 1 and found[:1] not in ([rows], [rows * tensor_size()]):
                yield f"{source} {read.shapes[source]}"


def _lacking(bridge: Any, model: Any, names: Iterable[str]) -> Iterator[str]:
    """Tensors of the Hugging Face model that parameters are made from, and that its files lack."""
    known = set(bridge.hf_pretrained.state.source.get_all_keys())
    for _, sources in _sources(bridge, model, names):
        yield from set(sources.values()) - known


def _sources(bridge: Any, model: Any, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """For each parameter, the tensors of the Hugging Face model that it is made from, by their roles."""
    from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global as named_globally

    registry = bridge._model_bridge.mapping_registry()
    for name in names:
        mapping = registry.megatron_to_hf_lookup(named_globally([model], model.config, name))
        found: Any = getattr(mapping, "hf_param", None) or {}
        yield name, {"": found} if isinstance(found, str) else dict(found)


def _to_be_filled(bridge: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and persistent buffers that Bridge has a mapping for."""
    registry = bridge._model_bridge.mapping_registry()
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            yield _unwrapped(name), parameter
    for name, buffer in model.named_buffers():
        is_mapped = id(buffer) in kept and registry.megatron_to_hf_lookup(_unwrapped(name)) is not None
        if is_mapped and buffer.is_floating_point():
            yield _unwrapped(name), buffer


def _unwrapped(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _check_experts(name: str, tensor: torch.Tensor, experts: int | None) -> None:
    """Check a tensor that has all experts: Bridge takes the rows it wants, and leaves the others."""
    if experts is None or not _STACKED.search(name) or tensor.shape[:1] == (experts,):
        return
    expected = f"one row for each of {experts} experts, as config.json says"
    raise _other_shapes(f"{name} {list(tensor.shape)}", expected)


@contextmanager
def _recorded(bridge: Any, experts: int | None) -> Iterator[_Read]:
    """What is read from the files meanwhile."""
    source, kind, read = bridge.hf_pretrained.state.source, type(bridge._model_bridge), _Read()
    stock, modify = source.load_tensors, kind.maybe_modify_loaded_hf_weight

    def load_tensors(keys: list[str]) -> Any:
        found = stock(keys)
        for name, tensor in found.items():
            read.add(name, tensor)
            _check_experts(name, tensor, experts)
        return found

    def maybe_modify_loaded_hf_weight(*args: Any, **kwargs: Any) -> Any:
        read.last.clear()  # the next parameter's begin
        return modify(*args, **kwargs)

    with Patches() as patches:
        patches.set(source, "load_tensors", load_tensors)
        patches.set(kind, "maybe_modify_loaded_hf_weight", maybe_modify_loaded_hf_weight)
        yield read


def _without_place(source: Any, read: Collection[str]) -> list[str]:
    """Tensors that nobody read, but for those that say nothing new."""
    known = list(source.get_all_keys())
    unread = [key for key in known if key not in read and not key.endswith(_MADE_ANEW)]
    copies = [key for key in unread if key.endswith(_OUTPUTS + _EMBEDDINGS) and _repeats(source, key, known)]
    return sorted(set(unread) - set(copies))


def _repeats(source: Any, key: str, known: Iterable[str]) -> bool:
    """Whether it is another one's embeddings or output layer once more."""
    others = [other for other in known if other.endswith(_OUTPUTS + _EMBEDDINGS) and other != key]
    (own,) = source.load_tensors([key]).values()
    return any(torch.equal(own, *source.load_tensors([other]).values()) for other in others)


def _on_all_ranks(names: Iterable[str]) -> set[str]:
    own = sorted(names)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {name for each in found for name in each}


@contextmanager
def left_out(bridge: Any, absent: Collection[int]) -> Iterator[list[str]]:
    """Let an export pass by parameters that the checkpoint lacks; the result fills with their names.  All ranks enter.

    Args:
        bridge: Bridge's converter.
        absent: Of this rank's parameters, by identity.
    """
    kind, names = type(bridge._model_bridge), list[str]()
    build: Callable[..., list[Any]] = kind.build_conversion_tasks

    def build_conversion_tasks(*args: Any, **kwargs: Any) -> list[Any]:
        tasks = build(*args, **kwargs)
        gone = _on_all_ranks(
            task.global_param_name for task in tasks if task is not None and id(task.param_weight) in absent
        )
        names[:] = sorted(gone)
        return [task for task in tasks if task is None or task.global_param_name not in gone]

    with Patches() as patches:
        patches.set(kind, "build_conversion_tasks", build_conversion_tasks)
        yield names

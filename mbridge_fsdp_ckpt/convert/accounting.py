"""Both sides of a conversion by Bridge: every tensor of the Hugging Face model and of Megatron's has a counterpart.

Bridge gives random numbers to what the files lack, drops what it has no place for, and lets a narrower type overflow,
without a word.  Here parameters are NaN before an import, and reads of tensors are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError, KeyMismatchError, brief
from mbridge_fsdp_ckpt.hosts.patching import Patches
from mbridge_fsdp_ckpt.loading.match import listed

_MADE_ANEW = "rotary_emb.inv_freq"
"""Tensors that some files have and every model computes."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embeddings.weight")
_OUTPUTS = ("lm_head.weight", "shared_head.head.weight")
"""Both may be there more than once: an output layer that is the embeddings, and those of multi-token prediction."""


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
        ConfigurationError: A value does not fit the type.
    """
    tensors = dict(_to_be_filled(bridge, model))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    with _recorded(bridge.hf_pretrained.state.source) as read:
        bridge.load_hf_weights([model])
    absent = _on_all_ranks(name for name, tensor in tensors.items() if tensor.isnan().any())
    if absent:
        raise KeyMismatchError(
            expected="a tensor of the Hugging Face model for every parameter",
            found=f"{len(absent)} not filled, or not with numbers: {listed(sorted(absent))}",
            remedy="Its files lack tensors, or have no numbers in them. Nothing was written.",
        )
    too_large = _on_all_ranks(name for name, tensor in tensors.items() if tensor.isinf().any())
    if too_large:
        raise ConfigurationError(
            expected="values that fit --torch-dtype",
            found=f"infinite ones in {len(too_large)} parameters: {listed(sorted(too_large))}",
            remedy="Give --torch-dtype bfloat16 or float32. Nothing was written.",
        )
    unread = _without_place(bridge.hf_pretrained.state.source, _on_all_ranks(read))
    if unread and strict:
        raise KeyMismatchError(
            expected="a place in the model for every tensor of the Hugging Face model",
            found=f"{len(unread)} without one: {listed(unread)}",
            remedy="--not-strict leaves them out. Nothing was written.",
        )
    return unread


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


@contextmanager
def _recorded(source: Any) -> Iterator[set[str]]:
    """The names of tensors that are read from the files meanwhile."""
    read, stock = set[str](), source.load_tensors

    def load_tensors(keys: list[str]) -> Any:
        found = stock(keys)
        read.update(found)
        return found

    with Patches() as patches:
        patches.set(source, "load_tensors", load_tensors)
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

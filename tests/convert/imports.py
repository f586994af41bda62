# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Imports of each family with one tensor removed, added, reshaped or cast: refused by its name, or right.

One rank builds a family's model once.  Each case writes the model's files anew and fills the model as an import does
(`accounting.check_files`, `accounting.fill`); what is compared is the whole model.

source: every value a multiple of 1/64 of at most 2, exact in bf16, fp16 and fp32   -> a cast must change nothing
        times 2, one tensor at a time                                              -> its elements alone double
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError
from tests.convert import hugging_face_runs as runs

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One tensor that is otherwise.

    Args:
        kind: How; one of `CHANGES`.
        tensor: Its name in the Hugging Face model.
    """

    kind: str
    tensor: str


def _with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return changed


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous()


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "removed": None,
    "added": None,
    "transposed": _transposed,
    "a row less": lambda tensor: tensor[:-1].contiguous(),
    "a row more": lambda tensor: torch.cat([tensor, tensor[-1:]]),
    "flattened": lambda tensor: tensor.flatten(),
    "to float32": lambda tensor: tensor.float(),
    "to float16": lambda tensor: tensor.half(),
    "too large": lambda tensor: _with(3.4e38)(tensor.float()),
    "not a number": _with(torch.nan),
    "infinite": _with(torch.inf),
    "doubled": lambda tensor: tensor * 2,
}
SHAPES = ("transposed", "a row less", "a row more", "flattened")


def cases_of(tensors: Tensors) -> Iterator[Case]:
    """All of a model, but for changes that change nothing."""
    for name, tensor in tensors.items():
        for kind, change in CHANGES.items():
            if kind not in SHAPES or (change is not None and change(tensor).shape != tensor.shape):
                yield Case(kind, name)


def changed(tensors: Tensors, case: Case) -> Tensors:
    """The tensors of a case."""
    found = dict(tensors)
    change = CHANGES[case.kind]
    if case.kind == "removed":
        del found[case.tensor]
    elif case.kind == "added":
        found[near(case.tensor)] = tensors[case.tensor].clone()
    elif change is not None:
        found[case.tensor] = change(tensors[case.tensor])
    return found


def near(name: str) -> str:
    """The name of the tensor that is added."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.{last}_2"


def even(tensors: Tensors) -> Tensors:
    """Tensors of the same shapes whose values are exact in each type."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randint(1, 129, tensor.shape, generator=generator) / 64).to(torch.bfloat16)
        for name, tensor in tensors.items()
    }


def of_family(name: str, folder: str, share: int, seed: str) -> list[tuple[str, str, str]]:
    """On one rank: the kind, the tensor and the end of each case that is drawn, one in `share`."""
    from safetensors.torch import load_file, save_file

    from mbridge_fsdp_ckpt.integrations.bridge.plugin import register
    from mbridge_fsdp_ckpt.integrations.bridge.process_group import process_group_for_conversion
    from mbridge_fsdp_ckpt.tools.convert import accounting, hugging_face

    if not runs.write_model(name, folder):
        return []
    file = Path(folder) / "model.safetensors"
    tensors = even(load_file(file))
    save_file(tensors, file, {"format": "pt"})
    cases = list(cases_of(tensors))
    drawn = random.Random(f"{name} {seed}").sample(cases, max(1, len(cases) // share))
    register()
    found = []
    with runs.begun_anew(), runs.without_cuda(), process_group_for_conversion():
        bridge, model = hugging_face._build(hugging_face.Source(folder), hugging_face.Sizes())
        accounting.fill(bridge, model, strict=True)
        right = _state(model)
        for case in drawn:
            save_file(changed(tensors, case), file, {"format": "pt"})
            try:
                with hugging_face._errors_named("importing", folder):
                    again = _bridge(folder)
                    accounting.check_files(again)
                    accounting.fill(again, model, strict=True)
            except CheckpointError as error:
                found.append((case.kind, case.tensor, _refused(case, error)))
            except Exception as error:
                found.append((case.kind, case.tensor, f"missed: {type(error).__name__} {error}"[:300]))
            else:
                found.append((case.kind, case.tensor, _taken(case, tensors, right, _state(model))))
    return found


def _bridge(folder: str) -> Any:
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.bfloat16)


def _state(model: Any) -> Tensors:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().clone() for name, value in state.items() if value.is_floating_point()}


def _refused(case: Case, error: CheckpointError) -> str:
    name = near(case.tensor) if case.kind == "added" else case.tensor
    said = str(error)
    if case.kind in ("to float32", "to float16", "doubled"):
        return f"missed: refused, {said}"[:300]
    return type(error).__name__ if name in said else f"missed: not named, {said}"[:300]


def _taken(case: Case, tensors: Tensors, right: Tensors, state: Tensors) -> str:
    """What the model must be: as if nothing was changed, or with that tensor's elements doubled."""
    differs = {name: right[name] != state[name] for name in right}
    if case.kind == "too large":  # of a tensor that the model keeps in float32
        last = torch.tensor([3.4e38])
        values = torch.cat([state[name][mask].float() for name, mask in differs.items()])
        return "right" if torch.equal(values, last) else "missed: taken, and wrong"
    if case.kind != "doubled":
        if any(mask.any() for mask in differs.values()):
            return "missed: taken, and wrong"
        same = case.kind in ("transposed", "flattened", "to float32", "to float16")
        return "right" if same else "missed: taken"
    before = torch.cat([right[name][mask].float() for name, mask in differs.items()])
    after = torch.cat([state[name][mask].float() for name, mask in differs.items()])
    own = tensors[case.tensor].float().flatten().sort().values
    if case.tensor.endswith("linear_attn.norm.weight"):  # which Megatron has less one
        before, after = before + 1, after + 1
    if torch.equal(after, before * 2) and torch.equal(before.sort().values, own):
        return "right"
    return f"missed: {before.numel()} elements changed, of {own.numel()}"

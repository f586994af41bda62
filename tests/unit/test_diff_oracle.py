# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`diff` beside a slow comparison of its own: pairs of checkpoints that differ in one thing each, or in none."""

from __future__ import annotations

import math
import random
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.tools.compare import Tolerance
from mbridge_fsdp_ckpt.tools.diff import Differences, differences
from tests.soak import sampling
from tests.unit.test_cli_diff import AVERAGE, NAME, STEP, WEIGHT, build

PAIRS = 1000
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
LIKE: list[list[Any]] = [
    [0, 0.0, -0.0, False, None, "", "0", [], (), {}, math.nan],
    [1, 1.0, True, "1", [1], (1,), {"0": 1}, {0: 1}, math.nextafter(1.0, 2.0)],
    [torch.tensor(0.0), torch.tensor(-0.0), torch.tensor([0.0]), torch.tensor(0, dtype=torch.int32), torch.tensor(0)],
    [2**63, float(2**63), -(2**63), 10**30, math.inf, -math.inf],
]
"""What a careless comparison takes for the same."""
NAMES: list[Any] = ["a", "b", "a.b", "'a.b'", "[0]", "0", 0, "", "é"]

State = dict[str, Any]
"""`tensors`, `values`, and `group`: the hyperparameters of the one parameter."""


def made(draw: random.Random) -> State:
    """Of one checkpoint."""
    dtype = draw.choice(DTYPES)
    state = {
        WEIGHT: torch.tensor([draw.randrange(2) for _ in range(70)]).to(dtype).reshape(7, 10),
        AVERAGE: torch.linspace(-1, 1, 70).reshape(7, 10),
        STEP: torch.tensor(float(draw.randrange(9))),
    }
    values = {name: nested(draw, 3) for name in ("iteration", "schedule", "more")}
    return {"tensors": state, "values": values, "group": {"lr": 0.1, "betas": (0.9, 0.95), "more": nested(draw, 2)}}


def nested(draw: random.Random, depth: int) -> Any:
    """Containers in containers, in which leaves lie that are nearly alike."""
    kind = draw.choice([dict, list, tuple, None]) if depth else None
    inner = [nested(draw, depth - 1) for _ in range(draw.randrange(4))] if kind else []
    if kind is dict:
        return dict(zip(draw.sample(NAMES, len(inner)), inner, strict=True))
    return kind(inner) if kind else deepcopy(draw.choice(draw.choice(LIKE)))


def same(a: Any, b: Any) -> bool:
    """The oracle: one thing after the other, by its type and its bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes_of(a) == bytes_of(b)
    if isinstance(a, dict):
        typed = [{(type(key), key): value for key, value in side.items()} for side in (a, b)]
        return typed[0].keys() == typed[1].keys() and all(same(value, typed[1][key]) for key, value in typed[0].items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return str(a) == str(b)  # floats: as many digits as tell them apart, the sign of zero, nan


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def change(draw: random.Random, state: State) -> str:
    """One thing; the beginning of the name under which it is found."""
    part = draw.choice(["tensors", "values", "group"])
    return change_tensors(draw, state["tensors"]) if part == "tensors" else change_nested(draw, state[part], part)


def change_tensors(draw: random.Random, tensors: dict[str, torch.Tensor]) -> str:
    key = draw.choice([WEIGHT, AVERAGE, STEP])
    how = draw.choice(["bit", "bit", "bit", "dtype", "shape", "gone"])
    if how == "gone":
        del tensors[key]
    elif how == "dtype":
        tensors[key] = tensors[key].to(torch.complex128)
    elif how == "shape" and key != STEP:
        tensors[key] = tensors[key][:-1]
    else:
        data = tensors[key].reshape(-1).view(torch.uint8)
        if tensors[key].dtype == torch.bool:
            data[draw.randrange(len(data))] ^= 1
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return key


def change_nested(draw: random.Random, values: dict[str, Any], part: str) -> str:
    name = draw.choice(list(values))
    inner = "values" if part == "values" else f"hyperparameters.{NAME}"
    values[name] = changed(draw, values[name])
    return f"{inner}.{name}"


def changed(draw: random.Random, value: Any) -> Any:
    """One thing in it: a leaf, an item more or less, a name, the kind of a container."""
    if not isinstance(value, dict | list | tuple) or not value or draw.random() < 0.2:
        return other(draw, value)
    if isinstance(value, dict):
        key = draw.choice(list(value))
        left = {name: inner for name, inner in value.items() if name is not key}
        renamed = draw.choice([name for name in NAMES if name not in left])
        return draw.choice([{**left, key: changed(draw, value[key])}, left, {**left, renamed: value[key]}])
    place = draw.randrange(len(value))
    before, after = list(value[:place]), list(value[place + 1 :])
    return type(value)([*before, changed(draw, value[place]), *after] if draw.random() < 0.7 else [*before, *after])


def other(draw: random.Random, value: Any) -> Any:
    """Something that is nearly the same."""
    if isinstance(value, list | tuple) and draw.random() < 0.5:
        return tuple(value) if isinstance(value, list) else list(value)
    near = next((group for group in LIKE if any(same(value, one) for one in group)), LIKE[0])
    unlike, numbers = [one for one in near if not same(one, value)], (bool, int, float)
    equal = [one for one in unlike if type(one) in numbers and type(value) in numbers and one == value]
    return deepcopy(draw.choice(equal or unlike))


def diff(root: Path, a: State, b: State, draw: random.Random) -> Differences:
    sides = [root / "a" / "iter_0000010", root / "b" / "iter_0000010"]
    for side, state in zip(sides, (a, b), strict=True):
        ranks, columns = draw.choice([(1, False), (2, False), (3, True)])
        build(side, state["tensors"], ranks=ranks, columns=columns, values=state["values"], group=state["group"])
    found = differences(sides[0], sides[1], Tolerance(), progress=Unwatched())
    shutil.rmtree(root)
    return found


def test_diff_finds_what_a_slow_comparison_finds(tmp_path: Path) -> None:
    draw: random.Random = sampling.rng("diff")
    unlike = 0
    for number in range(PAIRS if sampling.FULL else PAIRS // 10):
        a = made(draw)
        b = deepcopy(a)
        where = change(draw, b) if number % 8 else ""
        found = diff(tmp_path / str(number), a, b, draw)
        said = {*found.tensors, *found.values, *found.structure, *found.only_in_a, *found.only_in_b}
        context = f"{where}: {a} {b}; {sampling.how_to_repeat()}"
        assert bool(said) != same(a, b), context
        assert all(name.startswith(where) for name in said), (said, context)
        assert found.notes == []
        assert all(each.elements == 1 for each in found.tensors.values())
        unlike += bool(said)
    assert unlike > 50, "changes change something"

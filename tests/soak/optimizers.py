# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the matrix of optimizers: save in one job, load into another, look at every element, train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.errors import CheckpointError, InternalError, LoadInterruptedError
from testing.models import Trainable
from tests.patched import patched
from tests.soak import optimizer_oracle as oracle
from tests.soak import optimizer_twin as twin_of
from tests.soak.optimizer_cases import FROZEN, FUSED_WEIGHT, TOKENS, Case, Job, may_be_refused, trains_alike
from tests.soak.optimizer_jobs import LOADS, SAVES, built, made_special, train, without_scale
from tests.soak.optimizer_oracle import Snapshot

STEPS = 3  # after a load
NO_STEP = {"step": 0}  # a counter that is not there yet
NAMED = 4  # differences that are told


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, what was live when it was saved, and how training went on.

    Args:
        directory: Where it is.
        live: What was live.
        losses: Of the steps after it.
        end: What was live after those.
        failure: Why there is none.
    """

    directory: str
    live: Snapshot
    losses: list[float] = field(default_factory=list)
    end: Snapshot | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a case ended on a rank.

    Args:
        how: "loaded", or the name of an error.
        text: The error's.
        wrong: What is not as the oracle says.
    """

    how: str
    text: str = ""
    wrong: list[str] = field(default_factory=list)


def run(directory: str, cases: Sequence[Case]) -> list[Ended]:
    """One case after the other; jobs that save are the same for all cases that want the same."""
    saved: dict[tuple[str, Job, str], Saved] = {}
    found: dict[int, Ended] = {}
    for tensor in sorted({case.how.saved.tensor for case in cases}):
        for case in cases:
            key = case.saved, case.how.saved, case.how.lacks
            if case.how.saved.tensor == tensor and key not in saved:
                saved[key] = _saved(f"{directory}/{len(saved)}", case)
        for live in (1, 2):
            for number, case in enumerate(cases):
                if (case.how.saved.tensor, case.how.live.tensor) == (tensor, live):
                    before = saved[case.saved, case.how.saved, case.how.lacks]
                    found[number] = _load(case, before)
    return [found[number] for number in range(len(cases))]


def _saved(directory: str, case: Case) -> Saved:
    try:
        return _save(directory, case)
    except CheckpointError as error:  # the same on all ranks
        return Saved("", Snapshot(), failure=f"the save: {type(error).__name__}: {error}")


def _save(directory: str, case: Case) -> Saved:
    """Steps, a save, and the steps that a load must repeat."""
    job, how = case.how.saved, case.how
    trainable = built(case.saved, job, SAVES)
    train(trainable, range(job.steps))
    made_special(trainable, job.extra, SAVES)
    live = oracle.seen(trainable)
    with ExitStack() as stack:
        if how.lacks:
            stack.enter_context(patched("mbridge_fsdp_ckpt.saving.snapshot:optimizer_shards", _leaving_out(case)))
        settings = Settings(vocabulary_size=TOKENS, progress=False)
        mbridge_fsdp_ckpt.save(directory, model=trainable.model, optimizer=trainable.optimizer, settings=settings)
    without_scale(trainable)
    losses = train(trainable, range(job.steps, job.steps + STEPS))
    return Saved(directory, live, losses, oracle.seen(trainable))


def _leaving_out(case: Case) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Saves without some slots, as one by somebody else may be."""

    def make(shards: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found, stateless = shards(*args)
            return [each for each in found if not _is_left_out(case, each.key)], stateless

        return call

    return make


def _is_left_out(case: Case, key: str) -> bool:
    name, _, slot = key.rpartition(".")
    return oracle.missing(case, name[name.index("decoder") :] if "decoder" in name else name, slot)


def _load(case: Case, saved: Saved) -> Ended:
    """One case; what one rank finds wrong, all ranks know before anybody goes on."""
    if saved.failure:
        return Ended("", wrong=[saved.failure])
    job = case.how.live
    trainable = built(case.live, job, LOADS)
    train(trainable, range(20, 20 + job.steps))
    made_special(trainable, job.extra, LOADS)
    before, error = oracle.seen(trainable), _loaded(trainable, case, saved.directory)
    after, wrong = oracle.seen(trainable), list[str]()
    must = may_be_refused(case)
    if error is None:
        wrong += ["it was loaded, and must be refused"] * (must == "must")
        wrong += _differences(oracle.expected(case, saved.live, before), after, case) if must != "must" else []
    else:
        refused = isinstance(error, CheckpointError) and not isinstance(error, LoadInterruptedError | InternalError)
        wrong += [f"{type(error).__name__}: {error}"] * (must == "never" or not refused)
        wrong += _differences(before, after, None)
    wrong = _told_by_all(wrong)
    if error is None and not wrong:
        wrong = _told_by_all(_trained(trainable, case, saved, _twin(case, after)))
    return Ended("loaded" if error is None else type(error).__name__, str(error or ""), wrong)


def _loaded(trainable: Trainable, case: Case, directory: str) -> Exception | None:
    """The error of the load, if any."""
    how, any_state = case.how, "optimizer.state.*"
    missing, unexpected = list[str](), list[str]()
    if how.allowed and how.lacks in ("slot", "other slot"):
        missing = [f"{any_state}{oracle.lacking(case)}.{next(iter(case.kinds[0].slots))}"]
    elif how.allowed and how.lacks:
        missing = [f"{any_state}{FUSED_WEIGHT}*"]
    elif how.allowed and how.saved.frozen:
        missing = [f"{any_state}{FROZEN}.*"]
    elif how.allowed and how.live.frozen:
        unexpected = [f"{any_state}{FROZEN}.*"]
    settings = Settings(
        vocabulary_size=TOKENS, allow_missing=tuple(missing), allow_unexpected=tuple(unexpected), progress=False
    )
    weights, state = "load_weights", "load_optimizer"
    calls = {"all": ["load"], "weights": [weights], "optimizer": [state], "parts": [weights, state]}
    options: dict[str, Any] = {"settings": settings, **({"include": oracle.included} if how.half else {})}
    try:
        for name in calls[how.load]:
            load = getattr(mbridge_fsdp_ckpt, name)
            load(Path(directory), model=trainable.model, optimizer=trainable.optimizer, **options)
    except Exception as error:  # whatever it is, the case tells
        return error
    return None


def _twin(case: Case, after: Snapshot) -> Trainable | None:
    """A job set by hand to what is live, which is what the oracle says; None where the saved one tells of the steps."""
    if trains_alike(case) == "exactly":
        return None
    twin = built(case.live, case.how.live, LOADS)
    twin_of.put(twin, after)
    return twin


def _trained(trainable: Trainable, case: Case, saved: Saved, twin: Trainable | None) -> list[str]:
    """What is wrong with the steps after a load."""
    errors: list[str] = []
    without_scale(trainable)
    inner = trainable.optimizer.optimizer
    plain = inner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except Exception as error:  # the other ranks wait in collectives: go on to the end
            errors.append(f"a step: {type(error).__name__}: {error}")

    inner.step = step
    losses, first = train(trainable, range(case.how.saved.steps, case.how.saved.steps + STEPS)), saved.losses[0]
    del inner.step
    if errors:
        return errors[:1]
    wrong, end, alike = list[str](), oracle.seen(trainable), trains_alike(case)
    if not all(map(math.isfinite, losses)):
        wrong.append(f"losses {losses}")
    for kind, tensors in (("weight", end.weights), ("master", end.masters)):
        wrong += [f"after {STEPS} steps, {kind} {name} is not finite" for name, t in tensors.items() if not _finite(t)]
    wrong += [
        f"after {STEPS} steps, {slot} of {name} is not finite"
        for name, slots in end.slots.items()
        for slot, tensor in slots.items()
        if not _finite(tensor)
    ]
    if twin is not None:
        without_scale(twin)
        losses_of_twin = train(twin, range(case.how.saved.steps, case.how.saved.steps + STEPS))
        wrong += [f"losses {losses}, of a job set by hand {losses_of_twin}"] * (losses != losses_of_twin)
        wrong += [
            f"{text}, as of a job set by hand" for text in _differences(oracle.seen(twin), end, None, slots=False)
        ]
    if alike == "exactly":
        wrong += [f"losses {losses}, not {saved.losses}"] * (losses != saved.losses)
        wrong += _differences(saved.end, end, None, slots=False) if saved.end is not None else []
    elif alike == "nearly":
        wrong += _far(losses, saved, end, 5e-3 if case.live == "Lion" else 1e-3)
    elif case.how.load != "optimizer" and not case.how.half and abs(losses[0] - first) > 2e-3 * first:
        wrong.append(f"the first loss is {losses[0]}, not {first}")
    return wrong


def _far(losses: list[float], saved: Saved, end: Snapshot, most: float) -> list[str]:
    """What is further from the steps of the job that saved than rounding leads: a sign that turns is a whole update."""
    wrong = []
    if any(abs(one - other) > 2e-3 * other for one, other in zip(losses, saved.losses, strict=True)):
        wrong.append(f"losses {losses}, not near {saved.losses}")
    for name, weight in end.weights.items():
        other = saved.end.weights[name] if saved.end is not None else weight
        rows = TOKENS if "embedding" in name or "output_layer" in name else len(weight)
        mean = (weight[:rows].float() - other[:rows].float()).abs().mean().item()
        wrong += [f"after {STEPS} steps, {name} differs by {mean:.2g} in the mean"] * (mean > most)
    return wrong


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.float()).all())


def _told_by_all(wrong: list[str]) -> list[str]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, wrong)
    return list(dict.fromkeys(each for told in gathered for each in told))


def _differences(want: Snapshot, found: Snapshot, case: Case | None, *, slots: bool = True) -> list[str]:
    """Every element that is otherwise."""
    near = case is not None and (case.kinds[1].is_scaled or case.kinds[0].is_scaled)
    wrong = _unlike("weight", want.weights, found.weights)
    masters = want.masters.items()
    may_lack = want.optional - found.masters.keys()
    wrong += _unlike("master", {name: master for name, master in masters if name not in may_lack}, found.masters)
    for name in (want.slots.keys() | found.slots.keys()) if slots else ():
        if name in want.optional and name not in found.slots:
            continue
        one, other = dict(want.slots.get(name, {})), dict(found.slots.get(name, {}))
        if name in want.optional:
            one.pop("step", None), other.pop("step", None)
        wrong += _unlike(f"slot of {name}:", one, other, near=near)
    for name, numbers in want.numbers.items():
        live = found.numbers.get(name, {})
        unlike = {key for key, value in numbers.items() if (live[key] if key in live else NO_STEP.get(key)) != value}
        unlike |= {key for key in live.keys() - numbers.keys() if case is None}
        wrong += [f"{key} of {name}: {live.get(key)}, not {numbers.get(key)}" for key in sorted(unlike)]
    wrong += [f"names of parameters: {found.names}, not {want.names}"] * (found.names != want.names and slots)
    wrong += [f"loss scale: {found.scaler}, not {want.scaler}"] * (found.scaler != want.scaler)
    wrong += ["random numbers"] * (found.rng != want.rng and slots)
    return wrong[:NAMED] + [f"and {len(wrong) - NAMED} more"] * (len(wrong) > NAMED)


def _unlike(
    what: str, want: dict[str, torch.Tensor], found: dict[str, torch.Tensor], *, near: bool = False
) -> list[str]:
    wrong = [f"{what} {name} is absent" for name in want.keys() - found.keys()]
    wrong += [f"{what} {name} is there" for name in found.keys() - want.keys()]
    for name in sorted(want.keys() & found.keys()):
        one, other = want[name], found[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            wrong.append(f"{what} {name} is {other.dtype} {list(other.shape)}, not {one.dtype} {list(one.shape)}")
            continue
        close = torch.isclose(other, one, rtol=1e-3, atol=1e-7 * one.abs().max().item()) if near and one.dim() else None
        unlike = one != other if close is None else ~close
        if unlike.any():
            bad, nan = int(unlike.sum()), int((~torch.isfinite(other.float())).sum())
            most = (one.double() - other.double()).abs().nan_to_num().max().item()
            wrong.append(f"{what} {name}: {bad} of {one.numel()} elements, {nan} not finite, by up to {most:.3g}")
    return wrong


def told_of_changes() -> dict[str, list[str]]:
    """What is told where one element, or one number, becomes another; by what became another."""
    trainable = built("offload 1.0 over bf16", Job(), LOADS)
    train(trainable, range(1))
    inner = trainable.optimizer.optimizer
    parameter = max((p for p in inner.param_to_inner_param if p._local_tensor.numel()), key=torch.numel)
    master = inner.param_to_inner_param[parameter]
    state, told = inner.sub_optimizers[0].state[master], dict[str, list[str]]()
    tensors = {"weight": parameter._local_tensor, "master": master}
    for name, tensor in (tensors | {slot: state[slot] for slot in ("exp_avg", "exp_avg_sq", "step")}).items():
        before = oracle.seen(trainable)
        with torch.no_grad():
            tensor.view(-1)[-1] = float("nan") if name == "exp_avg" else tensor.view(-1)[-1] + 1
        told[name] = _told_by_all(_differences(before, oracle.seen(trainable), None))
    before = oracle.seen(trainable)
    inner.param_groups[1]["eps"] = 1.0
    told["eps"] = _differences(before, oracle.seen(trainable), None)
    return told

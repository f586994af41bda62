# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The matrix of optimizers: what each keeps, and what may be otherwise when its checkpoint is loaded.  Pure data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

TOKENS = 50
"""Rows of the vocabulary that are tokens; the others are padding."""

FUSED_WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
"""A parameter that is stored as two."""

FROZEN = "decoder.layers.0.mlp.linear_fc2.weight"
OWN_STEP = "decoder.layers.0.self_attention.linear_qkv.weight"

_OVER_BF16 = {"megatron_fsdp_main_params_dtype": None}
_ADAM = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer, and what it keeps.

    Args:
        recipe: Arguments of `Recipe`.
        slots: The dtype of each slot of the parameter's size as it is live, but for masters.
        counts: Where its step counter is.
        replaced: The class that takes the place of Megatron's, if any: see `optimizer_jobs`.
        master: Whether it keeps fp32 copies of weights that a checkpoint has.
        main: The dtype of the weights that it updates.
        updates: Optimizers of the same name train alike, up to rounding.
    """

    recipe: dict[str, Any]
    slots: dict[str, torch.dtype]
    counts: Literal["state", "group", "nowhere"] = "state"
    replaced: str = ""
    master: bool = False
    main: torch.dtype = torch.float32
    updates: str = "AdamW"

    @property
    def needs_engine(self) -> bool:
        """Whether it is Transformer Engine's."""
        return self.counts == "group"

    @property
    def is_scaled(self) -> bool:
        """Whether its slots have a scale a shard, which another shard rounds otherwise."""
        return torch.float16 in self.slots.values()


def _fused(dtype: torch.dtype) -> Kind:
    settings = {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    recipe = {"optimizer": "auto", "optimizer_settings": settings, "ddp": {"megatron_fsdp_use_decoupled_grad": True}}
    return Kind(recipe, dict.fromkeys(_ADAM, dtype), counts="group", updates=f"AdamW in {dtype}")


KINDS: dict[str, Kind] = {
    "AdamW": Kind({}, _ADAM),
    "AdamW, amsgrad": Kind({}, _ADAM | {"max_exp_avg_sq": torch.float32}, replaced="amsgrad", updates="amsgrad"),
    "SGD, momentum": Kind({}, {"momentum_buffer": torch.float32}, counts="nowhere", replaced="SGD", updates="SGD"),
    "Lion": Kind({}, {"exp_avg": torch.float32}, counts="nowhere", replaced="Lion", updates="Lion"),
    "FusedAdam": Kind({"optimizer": "auto"}, _ADAM, counts="group"),
    "FusedAdam, bf16 moments": _fused(torch.bfloat16),
    "FusedAdam, fp16 moments": _fused(torch.float16),
    "FusedAdam, masters over bf16": Kind(
        {"optimizer": "auto", "ddp": _OVER_BF16},
        _ADAM,
        counts="group",
        replaced="FusedAdam with masters",
        master=True,
        main=torch.bfloat16,
        updates="AdamW over bf16",
    ),
    "offload 1.0": Kind({"offload": 1.0}, _ADAM),
    "offload 0.5": Kind({"offload": 0.5}, _ADAM),
    "offload 1.0 over bf16": Kind(
        {"offload": 1.0, "ddp": _OVER_BF16}, _ADAM, master=True, main=torch.bfloat16, updates="AdamW over bf16"
    ),
}

Groups = Literal["two", "split", "one", "reordered"]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that saves or loads.

    Args:
        vocabulary: Rows of embeddings and output layer.
        tensor: The tensor-parallel size.
        groups: Megatron's two param groups, or what was made of them.
        alike: Whether the groups of the job that saves have the same numbers.
        names: Whether groups have the names of their parameters, as torch keeps them where it is given some.
        frozen: Whether a parameter is frozen.
        steps: Steps before the save, or before the load.
        extra: What else is special: "initial_lr", as schedulers leave it; "int64 step"; "a step of its own"; "loss
            scale", as training in fp16 has one.
    """

    vocabulary: int = 64
    tensor: int = 1
    groups: Groups = "two"
    alike: bool = False
    names: bool = False
    frozen: bool = False
    steps: int = 0
    extra: str = ""


SAVED = Job(steps=2)
LIVE = Job()


@dataclass(frozen=True, slots=True)
class Change:
    """What is otherwise when a checkpoint is loaded.

    Args:
        saved: The job that saved.
        live: The job that loads.
        load: What is loaded; "parts" for the weights first, and then the rest.
        half: Whether only the first layer is (`include=`).
        lacks: What of the fused parameter's state the checkpoint does not have: a slot of one of its two halves or of
            the other, or all.
        allowed: Whether the user allows for what is missing or unexpected.
    """

    saved: Job = SAVED
    live: Job = LIVE
    load: Literal["all", "weights", "optimizer", "parts"] = "all"
    half: bool = False
    lacks: Literal["", "slot", "other slot", "state"] = ""
    allowed: bool = False


def _saved(**how: Any) -> Job:
    return replace(SAVED, **how)


def _over(steps: int = 1, **how: Any) -> Job:
    return Job(steps=steps, **how)


CHANGES: dict[str, Change] = {
    "nothing": Change(),
    "nothing, over live state": Change(live=_over()),
    "padding 64 to 96": Change(live=Job(vocabulary=96)),
    "padding 64 to 96, over live state": Change(live=_over(vocabulary=96)),
    "padding 96 to 64": Change(saved=_saved(vocabulary=96)),
    "TP 1 to 2": Change(live=Job(tensor=2)),
    "TP 1 to 2, padding 64 to 96": Change(live=Job(tensor=2, vocabulary=96)),
    "TP 2 to 1": Change(saved=_saved(tensor=2)),
    "weights only": Change(load="weights"),
    "weights only, over live state": Change(load="weights", live=_over()),
    "weights only, padding 64 to 96": Change(load="weights", live=_over(vocabulary=96)),
    "optimizer only": Change(load="optimizer"),
    "optimizer only, over live state": Change(load="optimizer", live=_over()),
    "weights, then the optimizer": Change(load="parts"),
    "half of the layers": Change(half=True),
    "half of the layers, over live state": Change(half=True, live=_over(2)),
    "half of the layers, other steps": Change(half=True, live=_over(1)),
    "half of the layers, weights only": Change(half=True, load="weights", live=_over()),
    "a component's slot missing": Change(lacks="slot"),
    "a component's slot missing, allowed": Change(lacks="slot", allowed=True),
    "a component's slot missing, allowed, over live state": Change(lacks="slot", allowed=True, live=_over()),
    "the other component's slot missing, allowed": Change(lacks="other slot", allowed=True),
    "a parameter's state missing": Change(lacks="state"),
    "a parameter's state missing, allowed": Change(lacks="state", allowed=True),
    "a parameter's state missing, allowed, over live state": Change(lacks="state", allowed=True, live=_over()),
    "groups split": Change(live=Job(groups="split")),
    "groups merged, alike": Change(saved=_saved(alike=True), live=Job(groups="one")),
    "groups merged, unlike": Change(live=Job(groups="one")),
    "groups reordered": Change(live=Job(groups="reordered")),
    "groups named, and split": Change(saved=_saved(names=True), live=Job(groups="split", names=True)),
    "groups named, and merged": Change(saved=_saved(names=True, alike=True), live=Job(groups="one", names=True)),
    "groups named": Change(saved=_saved(names=True)),
    "a number that a scheduler left": Change(saved=_saved(extra="initial_lr")),
    "steps in int64": Change(saved=_saved(extra="int64 step")),
    "a step of its own": Change(saved=_saved(extra="a step of its own")),
    "a loss scale": Change(saved=_saved(extra="loss scale"), live=Job(extra="loss scale")),
    "before the first step": Change(saved=Job()),
    "before the first step, over live state": Change(saved=Job(), live=_over()),
    "frozen": Change(live=Job(frozen=True)),
    "frozen, allowed": Change(live=Job(frozen=True), allowed=True),
    "unfrozen": Change(saved=_saved(frozen=True)),
    "unfrozen, allowed": Change(saved=_saved(frozen=True), allowed=True),
}

ANOTHER = "another optimizer"
ANOTHER_OWN_STEP = "another optimizer, a step of its own"


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint of one optimizer, loaded into another or the same.

    Args:
        saved: The optimizer that saved, of `KINDS`.
        live: The one that loads.
        change: The name of what else is otherwise.
        how: That.
    """

    saved: str
    live: str
    change: str
    how: Change = field(repr=False)

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Of both."""
        return KINDS[self.saved], KINDS[self.live]


def _applies(change: Change, kind: Kind) -> bool:
    """Steps that are special need a step in the state; torch's fused kernels read no integers."""
    if change.saved.extra == "int64 step":
        return kind.counts == "state" and "offload" not in kind.recipe
    return change.saved.extra != "a step of its own" or kind.counts == "state"


def matrix() -> Iterator[Case]:
    """All cases, those of the same jobs one after the other."""
    for (name, kind), (change, how) in itertools.product(KINDS.items(), CHANGES.items()):
        if _applies(how, kind):
            yield Case(name, name, change, how)
    for saved, live in itertools.permutations(KINDS, 2):
        yield Case(saved, live, ANOTHER, Change())
        if KINDS[saved].counts == "state" and KINDS[live].counts == "group":
            yield Case(saved, live, ANOTHER_OWN_STEP, CHANGES["a step of its own"])


def may_be_refused(case: Case) -> str:
    """Whether a load must go through, may be refused, or must be: "never", "may", "must"."""
    how, (saved, live) = case.how, case.kinds
    lacking = bool(how.lacks) or how.saved.frozen or how.live.frozen
    if lacking and how.live.frozen and live.main == torch.float32 and how.load != "optimizer":
        return "must"  # Megatron-FSDP keeps frozen weights in bf16
    if lacking and not how.allowed:
        return "must"
    if how.live.groups == "one" and not how.saved.alike:
        return "must"
    if how.half and live.counts == "group" and how.load == "all" and how.live.steps != how.saved.steps:
        return "may"  # one counter for a group of which half is loaded
    if how.saved.extra == "a step of its own" and live.counts == "group":
        return "must"
    return _other_state(saved, live) if case.saved != case.live else "never"


def _other_state(saved: Kind, live: Kind) -> str:
    stored = {name: torch.float32 if dtype == torch.float16 else dtype for name, dtype in saved.slots.items()}
    if saved.main != live.main or saved.master != live.master:
        return "must"
    if stored.keys() != live.slots.keys() or (saved.counts == "nowhere") != (live.counts == "nowhere"):
        return "must"
    if torch.bfloat16 in live.slots.values() and torch.bfloat16 not in stored.values():
        return "must"
    return "may" if live.is_scaled and not saved.is_scaled else "never"


def trains_alike(case: Case) -> str:
    """Whether training goes on as that of the job that saved: "exactly", "nearly", or nobody knows: ""."""
    how, (saved, live) = case.how, case.kinds
    whole = how.load in ("all", "parts") and not (how.half or how.lacks or how.live.frozen or how.saved.frozen)
    if not whole or saved.updates != live.updates:
        return ""
    layout = _layout(how.saved) == _layout(how.live)
    same = case.saved == case.live and (how.live.groups == how.saved.groups or "0.5" not in case.live)
    return "exactly" if same and layout else "nearly"


def _layout(job: Job) -> tuple[int, int]:
    return job.vocabulary, job.tensor

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A load's meetings before anything changes: do all read the same, and does somebody ask for every key?

First sums, by buckets of keys: each rank adds the keys that it asks for, and takes off its share of those that the
checkpoint has.  Where these do not add up, the keys themselves, a bounded number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.coverage.buckets import BUCKETS, added, bucket_of, in_buckets, key_word, share_of_one
from mbridge_fsdp_ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    ErrorData,
    KeyMismatchError,
    PlanDisagreementError,
)
from mbridge_fsdp_ckpt.loading import exchange
from mbridge_fsdp_ckpt.loading.match import NAMED, listed
from mbridge_fsdp_ckpt.loading.opened import Opened
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, name_and_slot
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan, Slice
from mbridge_fsdp_ckpt.plan.tiling import PRIME
from mbridge_fsdp_ckpt.remedies import remedy

_IDENTITIES = 8
_KEYS_AT_ONCE, _BYTES_AT_ONCE = 8192, 3 << 20  # of one meeting


class Asked(TypedDict):
    """A rank's message for the verification, or several ranks': a fingerprint of the keys asked for.

    Args:
        checkpoints: What tells them from all others.
        asked: The fingerprint.
        slots: Zero in sum, if whoever holds some of a parameter found the same slots of it.
        replicas: How many a block has at most.
        skipped: The first keys that are missing, and may be, or that nobody is to ask for.
        lost: The error of a rank that lost those that read for it.
    """

    checkpoints: list[str]
    asked: list[int]
    slots: int
    replicas: int
    skipped: list[str]
    lost: ErrorData | None


class KeysDecided(TypedDict):
    """What the verification found.

    Args:
        disputed: The buckets in which keys do not add up, as many at a time as one meeting takes.
        slots_differ: Whether some ranks found other slots of a parameter than others.
        skipped: The first keys that are missing, and may be, or that nobody is to ask for.
    """

    disputed: list[list[int]]
    slots_differ: bool
    skipped: list[str]


type AskedByName = dict[str, tuple[str, bool, bool]]
"""By key: for which replicas somebody asked, as the bits of a number, whether for one twice, whether it is there."""


@dataclass(slots=True)
class SameCheckpoint(Round[list[str], None]):
    """Before ranks read for each other: have all opened the same checkpoint?"""

    opened: Outcome[Opened]
    phase = "comparison of what to read"

    def message(self) -> list[str] | CheckpointError:
        """What tells the checkpoint from all others."""
        return self.opened.message(lambda own: [own.source.metadata.identity])

    def combine(self, messages: list[list[str]]) -> list[str]:
        """The same of several ranks, up to a bound."""
        return sorted({one for message in messages for one in message})[:_IDENTITIES]

    def decide(self, whole: list[str]) -> None:
        """Refuse more than one."""
        if len(whole) > 1:
            raise ConfigurationError(
                expected="all ranks to read the same checkpoint",
                found=f"{len(whole)} different ones: {', '.join(whole)}",
                remedy="Is the directory on a file system that all hosts share, and settled?",
            )


@dataclass(slots=True)
class KeyCheck(Round[Asked, KeysDecided]):
    """First meeting of a load, once what a rank opened is staged: does somebody ask for every key of the checkpoint?"""

    opened: Outcome[Opened]
    staged: Outcome[int]
    phase = "verification"

    def message(self) -> Asked | CheckpointError:
        """What this rank asks for, bounded."""
        return exchange.message(self.staged, lambda lost: _asked(self.opened.value, lost))

    def combine(self, messages: list[Asked]) -> Asked:
        """What several ranks ask for."""
        return {
            "checkpoints": SameCheckpoint(self.opened).combine([message["checkpoints"] for message in messages]),
            "asked": added(message["asked"] for message in messages),
            "slots": sum(message["slots"] for message in messages) % PRIME,
            "replicas": max(message["replicas"] for message in messages),
            "skipped": sorted({key for message in messages for key in message["skipped"]})[:NAMED],
            "lost": exchange.first([message["lost"] for message in messages]),
        }

    def decide(self, whole: Asked) -> KeysDecided:
        """Find the buckets whose keys are to be named."""
        exchange.decide(whole["lost"])
        SameCheckpoint(self.opened).decide(whole["checkpoints"])
        bad = [bucket for bucket, total in enumerate(whole["asked"]) if total]
        groups = at_a_time(bad, len(self.opened.value.source.metadata.keys), whole["replicas"])
        return {"disputed": list(groups), "slots_differ": whole["slots"] != 0, "skipped": whole["skipped"]}


@dataclass(slots=True)
class UnexpectedKeys(Round[AskedByName, None]):
    """Only where the keys in some buckets do not add up: name those that nobody asks for.  One rank may be enough."""

    opened: Opened
    buckets: Sequence[int]
    phase = "unexpected keys"

    def message(self) -> AskedByName:
        """Keys that this rank asked for, and its share of those that are there."""
        wanted = set(self.buckets)
        own = [(key, 1 << slice_.replica.index) for key, slice_ in _declared(self.opened) if bucket_of(key) in wanted]
        there = [key for key in _offered(self.opened) if bucket_of(key) in wanted]
        asked: list[AskedByName] = [{key: (f"{bit:x}", False, False)} for key, bit in own]
        return self.combine([*asked, *({key: ("0", False, True)} for key in there)])

    def combine(self, messages: list[AskedByName]) -> AskedByName:
        """What several ranks asked for."""
        asked: dict[str, tuple[int, bool, bool]] = {}
        for message in messages:
            for key, (replicas, twice, there) in message.items():
                bits, (known, was_twice, was_there) = int(replicas, 16), asked.get(key, (0, False, False))
                asked[key] = known | bits, was_twice or twice or bool(known & bits), was_there or there
        return {key: (f"{bits:x}", twice, there) for key, (bits, twice, there) in sorted(asked.items())}

    def decide(self, whole: AskedByName) -> None:
        """Refuse keys that nobody asks for, and those for which one replica asks twice."""
        unexpected = [key for key, (replicas, _, there) in whole.items() if there and not int(replicas, 16)]
        if unexpected:
            raise KeyMismatchError(
                expected="every key of the checkpoint to have a place in the model",
                found=f"{len(unexpected)} unexpected: {listed(unexpected)}",
                remedy=remedy(
                    "Load a checkpoint of the same model.", "Or name keys to leave unread in {allow_unexpected}."
                ),
            )
        several = [key for key, (_, twice, _) in whole.items() if twice]
        if several:
            raise PlanDisagreementError(
                expected="one rank to hold the first element of a replica",
                found=f"{len(several)} keys of which several do: {listed(several)}",
                remedy="The ranks hold different models, or do not know of each other. Nothing was changed.",
                key=several[0],
            )


def _asked(opened: Opened, lost: ErrorData | None) -> Asked:
    declared = _declared(opened)
    shares = [(key, key_word(key) * share_of_one(slice_.replica)) for key, slice_ in declared]
    shares += [(key, -key_word(key)) for key in _offered(opened)]
    unread = (key for key in opened.offered if opened.settings.may_be_unexpected(key))
    return {
        "checkpoints": [opened.source.metadata.identity],
        "asked": in_buckets(shares),
        "slots": _slots_word(opened),
        "replicas": max((slice_.replica.count for _, slice_ in declared), default=1),
        "skipped": sorted({*unread, *opened.skipped})[:NAMED],
        "lost": lost,
    }


def _slots_word(opened: Opened) -> int:
    """Each holder adds a word for a parameter's slots as often as it has elements; who has the first takes all off."""
    total = 0
    for plan in opened.updated:
        if plan.layout.is_copy or not plan.slices:
            continue
        slots = sorted({slot for slice_ in plan.slices for slot in opened.slots[plan.state_name(slice_.component)]})
        word = key_word(" ".join((plan.layout.optimizer_name, *slots)))
        volume = sum(math.prod(component.global_shape) for component in plan.components)
        for slice_ in plan.slices:
            first = slice_.is_origin and slice_.component == plan.components[0]
            total += word * share_of_one(slice_.replica) * (slice_.box.volume - first * volume)
    return total % PRIME


def _declared(opened: Opened) -> list[tuple[str, Slice]]:
    """Keys whose first element this rank holds: over all ranks, each key once a replica."""
    declared = []
    for item in opened.planned:
        declared += [(item.plan.model_key(slice_.component), slice_) for slice_ in _origins(item.plan)]
    for plan in opened.updated:
        for slice_ in _origins(plan):
            slots = opened.slots.get(plan.state_name(slice_.component), {})
            declared += [(plan.slot_key(slice_.component, slot), slice_) for slot in slots]
    return [(key, slice_) for key, slice_ in declared if key in opened.asked]


def _origins(plan: ParameterPlan) -> list[Slice]:
    """A later stage's copy is no replica: the first stage asks for its key."""
    return [] if plan.layout.is_copy else [slice_ for slice_ in plan.slices if slice_.is_origin]


def at_a_time(buckets: Sequence[int], keys: int, replicas: int) -> Iterator[list[int]]:
    """Buckets in groups whose keys fit into one message.

    Args:
        buckets: Those to be looked at.
        keys: Of the whole checkpoint.
        replicas: Of one block, at most.
    """
    most = min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // (150 + replicas // 4))
    step = max(1, most * BUCKETS // max(1, keys))
    for first in range(0, len(buckets), step):
        yield list(buckets[first : first + step])


def _offered(opened: Opened) -> list[str]:
    """Of this rank's share of the checkpoint's keys, those that somebody has to ask for."""
    offered = [key for key in opened.offered if _is_wanted(opened, key)]
    return [key for key in offered if not opened.settings.may_be_unexpected(key)]


def _is_wanted(opened: Opened, key: str) -> bool:
    """Whether a key belongs to what is loaded, as far as its name tells."""
    named, include = name_and_slot(key), opened.include
    if key.startswith(MODEL_PREFIX):
        return opened.with_weights and (include is None or include(key.removeprefix(MODEL_PREFIX)))
    if named is None or not opened.with_state:
        return False
    return include is None or include(named[0].removeprefix(opened.state_prefix))

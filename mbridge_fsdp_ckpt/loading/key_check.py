# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A load's meetings before anything changes: do all ranks read the same, and does some rank ask for every key?

Ranks compare sums first, by buckets of keys: each rank adds the keys that it asks for, and subtracts its share of the
checkpoint's keys.  Where a bucket is not zero, they exchange the keys themselves, a bounded number at a time.
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
    """The message of one rank to the key check, or of several ranks combined.

    Args:
        checkpoints: The identities of the checkpoints that the ranks opened.
        asked: A fingerprint of the keys that the ranks ask for: sums by bucket.
        slots: A check sum, zero over all ranks if they found the same slots of each parameter.
        replicas: The largest number of ranks that hold copies of one block.
        skipped: The first keys that are missing, or stay unread, and are allowed to.
        lost: The error of a rank that lost the ranks that read for it; None where there is none.
    """

    checkpoints: list[str]
    asked: list[int]
    slots: int
    replicas: int
    skipped: list[str]
    lost: ErrorData | None


class KeysDecided(TypedDict):
    """The coordinator's decision of the key check.

    Args:
        disputed: The buckets that are not zero, in groups that one meeting each can name.
        slots_differ: Whether ranks found different slots of a parameter.
        skipped: The first keys that are missing, or stay unread, and are allowed to.
    """

    disputed: list[list[int]]
    slots_differ: bool
    skipped: list[str]


type AskedByName = dict[str, tuple[str, bool, bool]]
"""For each key: the replicas that ask for it, as hexadecimal bits; whether one asks twice; whether the checkpoint has
it."""


@dataclass(slots=True)
class SameCheckpoint(Round[list[str], None]):
    """A meeting before ranks read for each other: have all opened the same checkpoint?

    Args:
        opened: The checkpoint that this rank opened, or the error that it failed with.
    """

    opened: Outcome[Opened]
    phase = "comparison of what to read"

    def message(self) -> list[str] | CheckpointError:
        """The identity of the checkpoint that this rank opened."""
        return self.opened.message(lambda own: [own.source.metadata.identity])

    def combine(self, messages: list[list[str]]) -> list[str]:
        """The identities of the checkpoints that several ranks opened, the first eight."""
        return sorted({one for message in messages for one in message})[:_IDENTITIES]

    def decide(self, whole: list[str]) -> None:
        """Refuse more than one checkpoint."""
        if len(whole) > 1:
            raise ConfigurationError(
                expected="all ranks to read the same checkpoint",
                found=f"{len(whole)} different checkpoints: {', '.join(whole)}",
                remedy="Check that the directory is on a file system that all hosts share, and no job writes to it.",
            )


@dataclass(slots=True)
class KeyCheck(Round[Asked, KeysDecided]):
    """First meeting of a load, after staging: does some rank ask for every key of the checkpoint?

    Args:
        opened: The checkpoint that this rank opened, or the error that it failed with.
        staged: The bytes that this rank staged, or the error that it failed with.
    """

    opened: Outcome[Opened]
    staged: Outcome[int]
    phase = "verification"

    def message(self) -> Asked | CheckpointError:
        """The sums of the keys that this rank asks for."""
        return exchange.message(self.staged, lambda lost: _asked(self.opened.value, lost))

    def combine(self, messages: list[Asked]) -> Asked:
        """The sums of the keys that several ranks ask for."""
        return {
            "checkpoints": SameCheckpoint(self.opened).combine([message["checkpoints"] for message in messages]),
            "asked": added(message["asked"] for message in messages),
            "slots": sum(message["slots"] for message in messages) % PRIME,
            "replicas": max(message["replicas"] for message in messages),
            "skipped": sorted({key for message in messages for key in message["skipped"]})[:NAMED],
            "lost": exchange.first([message["lost"] for message in messages]),
        }

    def decide(self, whole: Asked) -> KeysDecided:
        """Find the buckets that are not zero, and whether slots differ."""
        exchange.decide(whole["lost"])
        SameCheckpoint(self.opened).decide(whole["checkpoints"])
        bad = [bucket for bucket, total in enumerate(whole["asked"]) if total]
        groups = at_a_time(bad, len(self.opened.value.source.metadata.keys), whole["replicas"])
        return {"disputed": list(groups), "slots_differ": whole["slots"] != 0, "skipped": whole["skipped"]}


@dataclass(slots=True)
class UnexpectedKeys(Round[AskedByName, None]):
    """A meeting that is held only where buckets are not zero: it names the keys that no rank asks for.

    Args:
        opened: The checkpoint that this rank opened.
        buckets: The buckets to look at.
    """

    opened: Opened
    buckets: Sequence[int]
    phase = "unexpected keys"

    def message(self) -> AskedByName:
        """The keys of these buckets that this rank asks for, and those in its share of the checkpoint's keys."""
        wanted = set(self.buckets)
        own = [(key, 1 << slice_.replica.index) for key, slice_ in _declared(self.opened) if bucket_of(key) in wanted]
        there = [key for key in _offered(self.opened) if bucket_of(key) in wanted]
        asked: list[AskedByName] = [{key: (f"{bit:x}", False, False)} for key, bit in own]
        return self.combine([*asked, *({key: ("0", False, True)} for key in there)])

    def combine(self, messages: list[AskedByName]) -> AskedByName:
        """The keys that several ranks ask for, or have in their shares."""
        asked: dict[str, tuple[int, bool, bool]] = {}
        for message in messages:
            for key, (replicas, twice, there) in message.items():
                bits, (known, was_twice, was_there) = int(replicas, 16), asked.get(key, (0, False, False))
                asked[key] = known | bits, was_twice or twice or bool(known & bits), was_there or there
        return {key: (f"{bits:x}", twice, there) for key, (bits, twice, there) in sorted(asked.items())}

    def decide(self, whole: AskedByName) -> None:
        """Refuse keys that no rank asks for, and keys that one replica asks for twice."""
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
                found=f"{len(several)} keys whose first element several ranks hold: {listed(several)}",
                remedy="The ranks hold different models, or do not know of each other. Nothing was changed.",
                key=several[0],
            )


@dataclass(slots=True)
class DifferingSlots(Round[None, None]):
    """The last meeting where ranks found different slots of a parameter and no other meeting found the cause."""

    phase = "slots of parameters"

    def message(self) -> None:
        """Nothing: the ranks know already that their slots differ."""

    def combine(self, messages: list[None]) -> None:
        """Nothing."""

    def decide(self, whole: None) -> None:
        """Refuse the load on all ranks: the checkpoint has the same slots for all of them, so the ranks differ."""
        raise PlanDisagreementError(
            expected="all ranks to load the same optimizer slots of each parameter",
            found="ranks that load different ones, while the index has the same slots for all of them",
            remedy="Pass the same model, optimizer, include and settings on every rank. Nothing was changed.",
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
    """This rank's part of a check sum that is zero over all ranks if they found the same slots of each parameter.

    Every rank adds a word, made from the parameter's name and its slots, once for each element that it holds.  The rank
    that holds the first element subtracts its own word once for each element of the whole parameter.
    """
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
    """The keys whose first element this rank holds, so that over all ranks each replica declares each key once."""
    declared = []
    for item in opened.planned:
        declared += [(item.plan.model_key(slice_.component), slice_) for slice_ in _origins(item.plan)]
    for plan in opened.updated:
        for slice_ in _origins(plan):
            slots = opened.slots.get(plan.state_name(slice_.component), {})
            declared += [(plan.slot_key(slice_.component, slot), slice_) for slot in slots]
    return [(key, slice_) for key, slice_ in declared if key in opened.asked]


def _origins(plan: ParameterPlan) -> list[Slice]:
    """The slices of a plan that hold a first element; none of a later pipeline stage's copy, which is no replica."""
    return [] if plan.layout.is_copy else [slice_ for slice_ in plan.slices if slice_.is_origin]


def at_a_time(buckets: Sequence[int], keys: int, replicas: int) -> Iterator[list[int]]:
    """Buckets in groups whose keys fit into one message.

    Args:
        buckets: The buckets to look at.
        keys: The number of keys in the checkpoint.
        replicas: The largest number of ranks that hold copies of one block.
    """
    most = min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // (150 + replicas // 4))
    step = max(1, most * BUCKETS // max(1, keys))
    for first in range(0, len(buckets), step):
        yield list(buckets[first : first + step])


def _offered(opened: Opened) -> list[str]:
    """The keys in this rank's share of the checkpoint's keys that some rank has to ask for."""
    offered = [key for key in opened.offered if _is_wanted(opened, key)]
    return [key for key in offered if not opened.settings.may_be_unexpected(key)]


def _is_wanted(opened: Opened, key: str) -> bool:
    """Whether a key, by its name, belongs to what is loaded."""
    name_with_slot, include = name_and_slot(key), opened.include
    if key.startswith(MODEL_PREFIX):
        return opened.with_weights and (include is None or include(key.removeprefix(MODEL_PREFIX)))
    if name_with_slot is None or not opened.with_state:
        return False
    return include is None or include(name_with_slot[0].removeprefix(opened.state_prefix))

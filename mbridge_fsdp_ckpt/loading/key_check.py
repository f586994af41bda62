# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whether somebody asks for every key of a checkpoint: what ranks bring to a load's meetings, and what comes of it.

First sums, by buckets of keys: each rank adds the keys that it asks for, and takes off its share of those that the
checkpoint has.  Where these do not add up, the keys themselves, a bounded number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypedDict

from mbridge_fsdp_ckpt.coverage import plans
from mbridge_fsdp_ckpt.errors import ConfigurationError, ErrorData, KeyMismatchError, PlanDisagreementError
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
    """What a load's first meeting found.

    Args:
        disputed: The buckets in which keys do not add up, as many at a time as one meeting takes.
        slots_differ: Whether some ranks found other slots of a parameter than others.
        skipped: See `Asked`.
    """

    disputed: list[list[int]]
    slots_differ: bool
    skipped: list[str]


type AskedByName = dict[str, tuple[str, bool, bool]]
"""By key: for which replicas somebody asked, as the bits of a number, whether for one twice, whether it is there."""


def announce(opened: Opened, lost: ErrorData | None = None) -> Asked:
    """The bounded message for the verification."""
    declared = _declared(opened)
    shares = [(key, plans.key_word(key) * plans.share_of_one(slice_.replica)) for key, slice_ in declared]
    shares += [(key, -plans.key_word(key)) for key in _offered(opened)]
    unread = (key for key in opened.offered if opened.settings.may_be_unexpected(key))
    return {
        "checkpoints": [opened.source.metadata.identity],
        "asked": plans.in_buckets(shares),
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
        word = plans.key_word(" ".join((plan.layout.optimizer_name, *slots)))
        volume = sum(math.prod(component.global_shape) for component in plan.components)
        for slice_ in plan.slices:
            first = slice_.is_origin and slice_.component == plan.components[0]
            total += word * plans.share_of_one(slice_.replica) * (slice_.box.volume - first * volume)
    return total % PRIME


def combine(messages: list[Asked]) -> Asked:
    """What several ranks ask for, as one message."""
    return {
        "checkpoints": combine_identities([message["checkpoints"] for message in messages]),
        "asked": plans.added(message["asked"] for message in messages),
        "slots": sum(message["slots"] for message in messages) % PRIME,
        "replicas": max(message["replicas"] for message in messages),
        "skipped": sorted({key for message in messages for key in message["skipped"]})[:NAMED],
        "lost": exchange.first([message["lost"] for message in messages]),
    }


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


def combine_identities(messages: list[list[str]]) -> list[str]:
    """What tells the checkpoints that several ranks read from all others."""
    return sorted({one for message in messages for one in message})[:_IDENTITIES]


def decide_identities(identities: list[str]) -> None:
    """Do all ranks read the same checkpoint?"""
    if len(identities) > 1:
        raise ConfigurationError(
            expected="all ranks to read the same checkpoint",
            found=f"{len(identities)} different ones: {', '.join(identities)}",
            remedy="Is the directory on a file system that all hosts share, and settled?",
        )


def decide(opened: Opened, asked: Asked) -> KeysDecided:
    """First meeting: does somebody ask for every key of the checkpoint?"""
    exchange.decide(asked["lost"])
    decide_identities(asked["checkpoints"])
    bad = list(plans.remainders_of(asked["asked"]))
    groups = at_a_time(bad, len(opened.source.metadata.keys), asked["replicas"])
    return {"disputed": list(groups), "slots_differ": asked["slots"] != 0, "skipped": asked["skipped"]}


def at_a_time(buckets: Sequence[int], keys: int, replicas: int) -> Iterator[list[int]]:
    """Buckets in groups whose keys fit into one message.

    Args:
        buckets: Those to be looked at.
        keys: Of the whole checkpoint.
        replicas: Of one block, at most.
    """
    most = min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // (150 + replicas // 4))
    step = max(1, most * plans.BUCKETS // max(1, keys))
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


def by_name(opened: Opened, buckets: Sequence[int]) -> AskedByName:
    """Keys that this rank asked for, and its share of those that are there, in buckets that did not add up."""
    wanted = set(buckets)
    own = [(key, 1 << slice_.replica.index) for key, slice_ in _declared(opened) if plans.bucket_of(key) in wanted]
    there = [key for key in _offered(opened) if plans.bucket_of(key) in wanted]
    asked: list[AskedByName] = [{key: (f"{bit:x}", False, False)} for key, bit in own]
    return combine_named([*asked, *({key: ("0", False, True)} for key in there)])


def combine_named(messages: list[AskedByName]) -> AskedByName:
    """What several ranks asked for, as one message."""
    asked: dict[str, tuple[int, bool, bool]] = {}
    for message in messages:
        for key, (replicas, twice, there) in message.items():
            bits, (known, was_twice, was_there) = int(replicas, 16), asked.get(key, (0, False, False))
            asked[key] = known | bits, was_twice or twice or bool(known & bits), was_there or there
    return {key: (f"{bits:x}", twice, there) for key, (bits, twice, there) in sorted(asked.items())}


def decide_named(asked: AskedByName) -> None:
    """Only where the keys do not add up: name those that nobody asks for.  Some ranks alone may ask for one."""
    unexpected = [key for key, (replicas, _, there) in asked.items() if there and not int(replicas, 16)]
    if unexpected:
        raise KeyMismatchError(
            expected="every key of the checkpoint to have a place in the model",
            found=f"{len(unexpected)} unexpected: {listed(unexpected)}",
            remedy=remedy(
                "Load a checkpoint of the same model.", "Or name keys to leave unread in {allow_unexpected}."
            ),
        )
    several = [key for key, (_, twice, _) in asked.items() if twice]
    if several:
        raise PlanDisagreementError(
            expected="one rank to hold the first element of a replica",
            found=f"{len(several)} keys of which several do: {listed(several)}",
            remedy="The ranks hold different models, or do not know of each other. Nothing was changed.",
            key=several[0],
        )

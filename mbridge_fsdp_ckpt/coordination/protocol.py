# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A rank's part in a meeting as a sequence of requests to the store; `meeting` makes them, tests explore them.

Ranks form a tree.  Messages are combined on the way to rank 0, which decides; everybody waits for one decision.

    rank r with children            a leaf                    rank 0
      gather its children's           put its message           gather its children's
      put all of them combined                                  decide, fence, publish the decision
      read the decision                read the decision

Two keys are written only once, by the first rank that writes them, and decide the outcome:

    outcome    fenced, a rank's error, or "r names who is missing"
    named      only after the last: who is missing; or, where r came to nothing meanwhile, r

The rank that settled the outcome also publishes it as the decision, so that the others wait for one key only.  If that
rank dies before, a rank that waits in vain finds the outcome in the two keys.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ARITY = 32
"""Children a rank: three levels for 32,768 ranks."""

NAMES = 32
"""Missing ranks that are named; there may be more."""

DECISION, OUTCOME, NAMED = "decision", "outcome", "named"
FENCED = json.dumps("fenced")


@dataclass(frozen=True, slots=True)
class Node:
    """A rank's place in the tree: rank 0 is the root.

    Args:
        rank: The rank.
        size: The number of ranks.
        arity: The number of children of a rank.
    """

    rank: int
    size: int
    arity: int = ARITY

    @property
    def leads(self) -> bool:
        """Whether the rank leads a group: it is the root, or gathers a branch of the tree for the root."""
        return self.rank == 0 or (self.rank <= self.arity and bool(self.children))

    @property
    def children(self) -> range:
        """The ranks whose messages this one gathers."""
        return children_of(self.rank, self.size, self.arity)


def children_of(rank: int, size: int, arity: int = ARITY) -> range:
    """The children of a rank."""
    first = rank * arity + 1
    return range(min(first, size), min(first + arity, size))


def message_of(rank: int) -> str:
    """The key of a rank's message: of its own and all below it, combined."""
    return str(rank)


def here(rank: int) -> str:
    """The key that tells that a rank with children has arrived, while it gathers their messages."""
    return f"{rank}/here"


class Put(NamedTuple):
    """Write a key.  Answer: None."""

    key: str
    value: str


class Settle(NamedTuple):
    """Write a key unless it has a value.  Answer: the value that holds."""

    key: str
    value: str


class Gather(NamedTuple):
    """Wait a little for all of some keys.  Answer: their values; None where one is not there yet."""

    keys: tuple[str, ...]


class Read(NamedTuple):
    """Wait a little for a key, or not at all.  Answer: its value, or None."""

    key: str
    waits: bool = True


class There(NamedTuple):
    """Answer: whether a key has a value."""

    key: str


class Drop(NamedTuple):
    """Delete keys that nobody needs any more.  Answer: None."""

    keys: tuple[str, ...]


class Patience(NamedTuple):
    """Begin a limit.  Answer: None.

    Args:
        for_messages: Whether the rank waits for messages; it gives up before ranks that only wait for the decision.
    """

    for_messages: bool = False


class Late(NamedTuple):
    """Answer: whether the limit has passed without a heartbeat."""


class Missing(NamedTuple):
    """Answer: the decision that names ranks of which no sign has come.

    Args:
        absent: The ranks.
        fenced: Whether what the meeting was about may have been done.
    """

    absent: tuple[int, ...]
    fenced: bool = False


class Combine(NamedTuple):
    """Make one message of several.  Answer: it, as text.

    Args:
        messages: This rank's own, and those of its children.
        decides: Whether this is rank 0, whose decision is the answer.  It may set the fence itself.
    """

    messages: tuple[str, ...]
    decides: bool = False


Request = Put | Settle | Gather | Read | There | Drop | Patience | Late | Missing | Combine
Steps = Generator[Request, Any, str]
"""Requests, and what the meeting came to in the end: a decision."""


def attend(node: Node, own: str) -> Steps:
    """All requests of a rank at one meeting, from its own message to the decision."""
    below = tuple(map(message_of, node.children))
    messages = (own,)
    if below:
        yield Put(here(node.rank), "")
        yield Patience(for_messages=True)
        while (found := (yield Gather(below))) is None:
            if (decision := (yield Read(DECISION, waits=False))) is not None:
                return str(decision)
            if (yield Late()):
                return (yield from _give_up(node))
        messages += tuple(found)
    if node.rank:
        yield Put(message_of(node.rank), (yield Combine(messages)))
        decision = yield from follow(node)
    else:
        decision = yield from _end(node, FENCED, (yield Combine(messages, decides=True)))
    if below:  # not before: until then they tell who has arrived
        yield Drop((*below, here(node.rank)))
    return str(decision)


def fail(node: Node, error: str) -> Steps:
    """Publish the error of a rank that has failed; among several errors the first one counts."""
    return (yield from _end(node, failed(node, error), error))


def failed(node: Node, error: str) -> str:
    """The outcome of a meeting in which all ranks raise the error of this rank."""
    return json.dumps([node.rank, error])


def _end(node: Node, outcome: str, decision: str) -> Steps:
    """Publish a decision if its outcome is the first."""
    held = yield Settle(OUTCOME, outcome)
    if held != outcome:
        return (yield from follow(node))
    yield Put(DECISION, decision)
    return decision


def follow(node: Node) -> Steps:
    """Wait for the decision."""
    yield Patience()
    while (decision := (yield Read(DECISION))) is None:
        if (yield Late()):
            return (yield from _give_up(node))
    return str(decision)


def _give_up(node: Node) -> Steps:
    """Give up after the limit: the first rank that does so names the missing ranks for all."""
    own = json.dumps(node.rank)
    held = yield Settle(OUTCOME, own)
    if held == own:
        return (yield from _name((yield from _absent(node))))
    yield Patience()
    while (decision := (yield Read(DECISION))) is None:
        if (yield Late()):
            return (yield from _without(held))
    return str(decision)


def _without(outcome: str) -> Steps:
    """Publish the decision in place of the rank that settled the outcome and has published nothing since.

    Args:
        outcome: The outcome that holds: a rank's error, a rank that names who is missing, or the fence.
    """
    held = json.loads(outcome)
    if isinstance(held, int):
        return (yield from _name([held]))
    if isinstance(held, list):
        yield Put(DECISION, held[1])
        return str(held[1])
    return str((yield Missing((0,), fenced=True)))  # it may have been done, and nobody can know


def _name(absent: Sequence[int]) -> Steps:
    """Publish the missing ranks; among several ranks that publish some, the first one counts."""
    held = yield Settle(NAMED, (yield Missing(tuple(absent))))
    yield Put(DECISION, held)
    return str(held)


def _absent(node: Node) -> Generator[Request, Any, list[int]]:
    """Ranks that have not arrived, from the root downwards, as far as they are named.

    A message tells of all below its rank, so that few are asked for.  A rank that has all messages below it, and put
    none of its own, is missing, too.
    """
    found: list[int] = []
    silent = [0]
    for rank in silent:
        if len(found) > NAMES:
            break
        below: list[int] = []
        for child in children_of(rank, node.size, node.arity):
            if not (yield There(message_of(child))):
                below.append(child)
        if not below or not (yield There(here(rank))):
            found.append(rank)
        silent += below
    return found

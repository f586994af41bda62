# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every interleaving of small meetings: what ranks do is explored step by step, with deaths, failures and slow ranks.

The model knows the requests and nothing of how `protocol` uses them: a store, whose requests are atomic; ranks, which
may die between any two; limits, which may pass whenever a rank waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mbridge_fsdp_ckpt.coordination import protocol
from mbridge_fsdp_ckpt.coordination.protocol import (
    DECISION,
    FENCED,
    OUTCOME,
    Combine,
    Drop,
    Gather,
    Late,
    Missing,
    Node,
    Patience,
    Put,
    Read,
    Request,
    Settle,
    There,
)

ANSWER = json.dumps("decided")


@dataclass(frozen=True)
class World:
    """One state: what is in the store, what each rank has been answered, who is dead, what each came to."""

    store: frozenset[tuple[str, str]]
    answers: tuple[tuple[Any, ...], ...]
    dead: frozenset[int] = frozenset()
    decisions: tuple[str | None, ...] = ()
    committed: bool = False


@dataclass(frozen=True)
class Case:
    """What may happen.

    Args:
        size: Ranks.
        arity: Children a rank.
        deaths: Ranks that may die, one of them in each run.
        failing: Ranks that fail before they come.
        is_patient: Limits pass only where nothing else can happen any more.
        fences: The coordinator fences, and commits what cannot be undone.
    """

    size: int
    arity: int = 2
    deaths: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    is_patient: bool = True
    fences: bool = True


def begun(case: Case, rank: int) -> protocol.Steps:
    node = Node(rank, case.size, case.arity)
    if rank in case.failing:
        return protocol.fail(node, json.dumps(f"error of {rank}"))
    return protocol.attend(node, json.dumps([rank]))


def next_request(case: Case, rank: int, answers: tuple[Any, ...]) -> Request | str:
    """What a rank asks next after these answers; its decision where it is done."""
    steps = begun(case, rank)
    try:
        request = next(steps)
        for answer in answers:
            request = steps.send(answer)
    except StopIteration as stop:
        return str(stop.value)
    return request


def successors(case: Case, world: World) -> Iterator[World]:
    """All that can happen next."""
    alive = [rank for rank in range(case.size) if rank not in world.dead and world.decisions[rank] is None]
    moved = False
    for rank in alive:
        for after in answered(case, world, rank):
            moved = True
            yield after
    if not moved or not case.is_patient:
        for rank in alive:
            yield from impatient(case, world, rank)
    if not world.dead:
        for rank in alive:
            if rank in case.deaths:
                yield replace(world, dead=frozenset({rank}))


def answered(case: Case, world: World, rank: int) -> Iterator[World]:
    """A rank's next request is answered; nothing where it has to wait."""
    request = next_request(case, rank, world.answers[rank])
    store = dict(world.store)
    match request:
        case Put(key, value):
            yield told(case, world, rank, None, {**store, key: value})
        case Settle(key, value):
            held = store.get(key, value)
            yield told(case, world, rank, held, {**store, key: held})
        case Gather(keys):
            if all(key in store for key in keys):
                yield told(case, world, rank, [store[key] for key in keys], store)
            elif DECISION in store:
                yield told(case, world, rank, None, store)
        case Read(key, waits):
            if key in store or not waits:
                yield told(case, world, rank, store.get(key), store)
        case There(key):
            yield told(case, world, rank, key in store, store)
        case Drop(keys):
            yield told(case, world, rank, None, {key: value for key, value in store.items() if key not in keys})
        case Patience():
            yield told(case, world, rank, None, store)
        case Late():  # asked only after nothing came in time: see `impatient`
            yield told(case, world, rank, True, store)
        case Missing(ranks, fenced):
            yield told(case, world, rank, lost(list(ranks), fenced=fenced), store)
        case Combine(messages, False):
            yield told(case, world, rank, together(messages), store)
        case Combine(messages):
            assert json.loads(together(messages)) == list(range(case.size)), "decided without all messages"
            held = store.get(OUTCOME, FENCED)
            if not case.fences:
                yield told(case, world, rank, ANSWER, store)
            elif held == FENCED:
                yield replace(told(case, world, rank, ANSWER, {**store, OUTCOME: held}), committed=True)
            else:
                yield told(case, world, rank, json.dumps("gave up"), store)


def impatient(case: Case, world: World, rank: int) -> Iterator[World]:
    """A rank that waits has waited too long."""
    request = next_request(case, rank, world.answers[rank])
    if isinstance(request, Gather) or (isinstance(request, Read) and request.waits):
        keys = request.keys if isinstance(request, Gather) else (request.key,)
        if not all(key in dict(world.store) for key in keys):
            yield told(case, world, rank, None, dict(world.store))


def told(case: Case, world: World, rank: int, answer: Any, store: dict[str, str]) -> World:
    answers = list(world.answers)
    answers[rank] = (*answers[rank], tuple(answer) if isinstance(answer, list) else answer)
    decisions = list(world.decisions)
    after = next_request(case, rank, answers[rank])
    decisions[rank] = after if isinstance(after, str) else None
    return replace(world, store=frozenset(store.items()), answers=tuple(answers), decisions=tuple(decisions))


def lost(ranks: list[int], *, fenced: bool = False) -> str:
    """A decision that names ranks."""
    return json.dumps({"absent": ranks, "fenced": fenced})


def together(messages: tuple[str, ...]) -> str:
    return json.dumps(sorted(rank for message in messages for rank in json.loads(message)))


def explored(case: Case) -> list[World]:
    """Every state in which nothing can happen any more; each state is looked at once."""
    first = World(frozenset(), ((),) * case.size, decisions=(None,) * case.size)
    seen, waiting, ends = {first}, [first], []
    while waiting:
        world = waiting.pop()
        after = list(successors(case, world))
        if not after:
            ends.append(world)
        for one in after:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return ends


def results(world: World) -> set[str | None]:
    """What the ranks that live came to."""
    return {decision for rank, decision in enumerate(world.decisions) if rank not in world.dead}


def absent(decision: str | None) -> list[int] | None:
    """Who a decision says is missing."""
    found = json.loads(decision or "null")
    return found["absent"] if isinstance(found, dict) else None


SMALL = [(1, 2), (2, 2), (3, 2), (4, 2), (4, 1), (5, 4)]


@pytest.mark.parametrize(("size", "arity"), SMALL)
def test_all_get_the_judges_answer_and_the_store_is_as_small_as_before(size: int, arity: int) -> None:
    ends = explored(Case(size, arity))
    assert ends
    for world in ends:
        assert results(world) == {ANSWER}
        assert {key for key, _ in world.store} == {DECISION, OUTCOME}


@pytest.mark.parametrize(("size", "arity"), [(2, 2), (3, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("fences", [True, False])
def test_whoever_dies_the_others_hear_one_thing_and_nobody_that_lives_is_named(
    size: int, arity: int, fences: bool
) -> None:
    for world in explored(Case(size, arity, deaths=frozenset(range(size)), fences=fences)):
        living = results(world)
        assert len(living) <= 1, world
        assert None not in living, "somebody waits for ever"
        for decision in living:
            named = absent(decision)
            if named is not None:
                assert named, "nobody is named"
                assert set(named) <= world.dead, world
        if world.committed and living:
            assert living <= {ANSWER, lost([0], fenced=True)}


@pytest.mark.parametrize(("size", "arity"), [(2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("dies", [False, True])
def test_however_slow_ranks_are_nobody_commits_what_others_gave_up(size: int, arity: int, dies: bool) -> None:
    deaths = frozenset(range(size)) if dies else frozenset()
    for world in explored(Case(size, arity, deaths=deaths, is_patient=False)):
        living = results(world)
        assert None not in living
        said = living - {lost([0], fenced=True)}
        assert len(said) <= 1, world
        if world.committed:
            assert said <= {ANSWER}
        else:
            assert ANSWER not in said


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {1, 2}, {0, 2}])
@pytest.mark.parametrize("arity", [1, 2])
def test_an_error_is_everyones_and_the_same(failing: set[int], arity: int) -> None:
    for world in explored(Case(3, arity, failing=frozenset(failing))):
        (decision,) = results(world)
        assert decision in {json.dumps(f"error of {rank}") for rank in failing}
        assert not world.committed


@pytest.mark.parametrize("arity", [1, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_is_heard_though_its_rank_dies_while_it_tells(failing: int, arity: int) -> None:
    """Before it has told anybody it is missing; after it, it is heard by all."""
    ends = explored(Case(3, arity, failing=frozenset({failing}), deaths=frozenset({failing})))
    said = {decision for world in ends for decision in results(world)}
    assert said == {json.dumps(f"error of {failing}"), lost([failing])}
    for world in ends:
        assert len(results(world)) == 1
        assert (OUTCOME, json.dumps([failing, json.dumps(f"error of {failing}")])) not in world.store or results(
            world
        ) == {json.dumps(f"error of {failing}")}


@pytest.mark.parametrize("key", ["decision", "outcome", "named"])
def test_keys_of_the_meeting_are_no_messages(key: str) -> None:
    assert key in {protocol.DECISION, protocol.OUTCOME, protocol.NAMED}
    assert not key.isdigit()


@pytest.mark.parametrize("arity", [1, 2, 3, 32])
@pytest.mark.parametrize("size", [1, 2, 5, 33, 100, 1057])
def test_every_rank_but_the_first_has_one_parent_that_comes_before_it(size: int, arity: int) -> None:
    children = [child for rank in range(size) for child in protocol.children_of(rank, size, arity)]
    assert sorted(children) == list(range(1, size))
    assert all(child > rank for rank in range(size) for child in protocol.children_of(rank, size, arity))

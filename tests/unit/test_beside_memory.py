# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a trainer stages, its writer reads: the same bytes, of the same save, or an error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mbridge_fsdp_ckpt.coverage.plans import Block
from mbridge_fsdp_ckpt.errors import InternalError, SaveAbandonedError, StorageError
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.layout import Axis
from mbridge_fsdp_ckpt.saving.background import wire
from mbridge_fsdp_ckpt.saving.background.arriving import Arriving
from mbridge_fsdp_ckpt.saving.background.channel import Channel, encoded
from mbridge_fsdp_ckpt.saving.background.filling import Filling, OnHost
from mbridge_fsdp_ckpt.saving.background.memory import PORTION, Staging, capacity_for, length_of
from mbridge_fsdp_ckpt.saving.snapshot import Prepared, write_plan_of
from mbridge_fsdp_ckpt.saving.write_plan import WritePlan
from tests.unit.shards import scalar, shards

LIMIT_S = 10.0


def write_plan(lengths: list[int], dtype: str = "bfloat16") -> WritePlan:
    """Chunks of so many elements."""
    blocks = [
        Block(f"key{n}", dtype, "sharded", (length,), Box((0,), (length,)), Axis(0, 1), False, True)
        for n, length in enumerate(lengths)
    ]
    return WritePlan(blocks, {}, [], [], RankIndex(0, {}, None, {}), {}, ("model",), {})


class Ring:
    """Both sides, in two threads of one process."""

    def __init__(self, what: WritePlan, capacity: int, save: int = 3) -> None:
        self.staging, self.save = Staging.create(capacity), save
        self.staged = Arriving(what, self.staging, save, self.free, LIMIT_S)
        self._changed, self._free = threading.Condition(), 0

    def free(self, portions: int) -> None:
        with self._changed:
            self._free = portions
            self._changed.notify_all()

    def filled(self, portions: int) -> None:
        self.staged.hear({"filled": portions})

    def wait_for_slot(self, portion: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._free > portion - self.staging.capacity, LIMIT_S)


LENGTHS = st.lists(st.one_of(st.integers(0, 100), st.integers(PORTION // 4, 2 * PORTION)), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(2, 6))
def test_a_ring_of_any_size_passes_on_what_is_staged(lengths: list[int], capacity: int) -> None:
    what = write_plan(lengths)
    tensors = [(torch.arange(length) % 251 + n).to(torch.bfloat16) for n, length in enumerate(lengths)]
    ring = Ring(what, capacity)
    filling = Filling(ring.staging, ring.save, ring, OnHost())

    def fill() -> None:
        for tensor in tensors:
            filling.add(tensor, lambda: None)
        filling.end()

    filler = threading.Thread(target=fill)
    filler.start()
    for pieces, tensor in zip(ring.staged.each(range(len(tensors))), tensors, strict=True):
        found = b"".join(map(bytes, pieces))
        assert found == tensor.view(torch.uint8).numpy().tobytes()
    filler.join()
    ring.staging.close()


@pytest.mark.parametrize(
    ("sizes", "length", "capacity"),
    [
        ([], 0, 2),
        ([1], 1, 2),
        ([1, 1], 65, 2),
        ([PORTION] * 2, 2 * PORTION, 2),
        ([PORTION, 4 * PORTION + 1], 5 * PORTION + 1, 6),
    ],
)
def test_how_much_memory_a_save_takes(sizes: list[int], length: int, capacity: int) -> None:
    assert length_of(sizes) == length
    assert capacity_for(length, None) == capacity
    assert capacity_for(length, 3 * PORTION) == min(capacity, 3)


def test_what_an_earlier_save_left_there_is_refused() -> None:
    """As if the trainer had announced a portion that it has not copied."""
    what = write_plan([10])
    ring = Ring(what, 2, save=3)
    Filling(ring.staging, 2, ring, OnHost()).add(torch.zeros(10, dtype=torch.bfloat16), lambda: None)
    ring.staging.stamp(0, 2)
    ring.filled(1)
    with pytest.raises(InternalError, match="portion 0 of save 3"):
        list(*ring.staged.each([0]))


def test_nothing_that_comes_and_an_error_end_the_wait() -> None:
    staging = Staging.create(2)
    with pytest.raises(SaveAbandonedError, match="no further portion within"):
        list(*Arriving(write_plan([10]), staging, 1, print, 0.05).each([0]))
    broken = Arriving(write_plan([10]), staging, 1, print, LIMIT_S)
    broken.hear({"broken": StorageError(expected="a", found="b", remedy="c").to_wire()})
    with pytest.raises(StorageError):
        next(broken.digests([0]))


def test_all_that_a_writer_needs_crosses_as_json() -> None:
    held = [*shards(0, 6), scalar("step")]
    own = RankOwn(values={"seed": [1, 2.5, None]}, extra_state={"fp8": {}})
    said = RankIndex(2, {"rank": 2, "data": 1}, None, {}, {"a": 7}, ["b"], ["c"], own, {"group": 2**63})
    what = write_plan_of(held, held[-1:], said, {2**64 - 1: {"lr": 0.1}}, ("model", "optimizer"), {"world": 4})
    what = Prepared(what, held, held[-1:], {}).read()
    layout = json.loads(json.dumps(wire.layout_to_wire(wire.layout_of(what))))
    rest = json.loads(json.dumps(wire.to_wire(what)))
    assert wire.from_wire(rest, wire.layout_from_wire(layout), 2) == what


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield one, other
    one.close()
    other.close()


def test_messages_of_any_length_and_memory_cross(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    staging, heard = Staging.create(2), other.messages()
    staging.stamp(1, 9)
    one.send(encoded({"first": 1}), staging.descriptor)
    assert next(heard) == {"first": 1}
    shared = Staging(other.descriptor(), 2)
    assert shared.has(1, 9)
    assert not shared.has(1, 8)
    long = {"long": "x" * (3 << 20)}
    sender = threading.Thread(target=one.send, args=(encoded(long),))
    sender.start()
    assert next(heard) == long
    sender.join()
    one.close()
    assert list(heard) == []
    with pytest.raises(BrokenPipeError):
        other.send(encoded({"more": 1}))

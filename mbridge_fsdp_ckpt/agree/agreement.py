"""The one exchange between ranks: all bring a message, these are combined, one judges, all get the same verdict.

No collective.  Ranks meet in the job's rendezvous store, where waiting has a time limit and who is missing can be told
by name (`meeting`).  A collective has neither: a rank that raised before it leaves the others waiting until a watchdog
ends the job.

Who comes first in a sequence writes what it begins: whoever begins something else fails at once, and with it all.
Rank 0 serves the store in many jobs: after the last word of a sequence it stays a little, until everyone has read it.

Cost: a constant number of store requests a rank, however many ranks there are.  Messages are combined on a tree
(`protocol`), bounded by who combines them: nobody handles one of every rank.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch.distributed as dist

from mbridge_fsdp_ckpt.agree.meeting import HOSTS, Meeting, lost
from mbridge_fsdp_ckpt.agree.protocol import Node
from mbridge_fsdp_ckpt.agree.signs import STORE_ERRORS, Signs, Watch
from mbridge_fsdp_ckpt.agree.wire import Combining, Judging, combined, judged, nothing, to_wire
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.settings import DEFAULT_STORAGE_LIMIT, DEFAULT_TIME_LIMIT


@dataclass(slots=True)
class Agreement:
    """A sequence of meetings of all ranks.

    Args:
        name: Common to all ranks and new for each sequence; see `next_agreement`.
        rank: This rank.
        world_size: All ranks.
        time_limit: Seconds that a rank waits for the others at each meeting, counted from its own arrival or from
            the last sign of life of any other rank.
        store: The store they meet in; None with a single rank.
        storage_limit: Seconds that a rank may be inside one call of the storage, without a step of its own.
        on_beat: Called with every step, in the thread that works.
    """

    name: str
    rank: int
    world_size: int
    time_limit: float
    store: dist.Store | None = None
    storage_limit: float = DEFAULT_STORAGE_LIMIT
    on_beat: Callable[[], None] = lambda: None
    _meetings: int = field(default=0)
    _sealed: bool = field(default=False)
    _last: Meeting | None = field(default=None)
    _begun: str | None = field(default=None)
    _signs: Signs = field(init=False)

    def __post_init__(self) -> None:
        self._signs = Signs(self.store, self.name, self.time_limit, self.storage_limit, self.world_size)

    @property
    def leads(self) -> int | None:
        """This rank, if it leads a group, where the messages of the group meet: each rank is in one; see `protocol`."""
        return self.rank if Node(self.rank, self.world_size).leads else None

    def begin(self, purpose: str) -> None:
        """Before the first meeting: what this rank is about to do, and where.

        Raises:
            ConfigurationError: The ranks begin different things.
        """
        if self.store is None:
            return
        own = json.dumps([self.rank, purpose])
        first, begun = json.loads(self.store.compare_set(f"{self.name}/purpose", "", own))
        if begun == purpose:
            self._begun = f"{self.name}/begun"
            if self.rank == 0:
                self.store.set(self._begun, "")
            return
        named = sorted([(first, begun), (self.rank, purpose)])
        error = ConfigurationError(
            expected="all ranks to begin the same save or load",
            found=", ".join(f"rank {rank}: {what}" for rank, what in named),
            remedy="Call save and load in the same order and with the same directory on every rank.",
        )
        self._enter(self.store, "beginning", self._meetings + 1).claim(to_wire(error, "beginning", self.rank))
        if self.rank == 0:
            self.store.set(f"{self.name}/begun", "")
        self.meet("beginning", error, nothing, nothing)

    def meet[M, V](self, phase: str, message: M | CheckpointError, judge: Judging[M, V], combine: Combining[M]) -> V:
        """Bring a message; get what `judge`, called on rank 0 with all messages combined, returns.

        Args:
            phase: What this meeting is for, in errors.
            message: JSON-able and bounded, or a `CheckpointError` that this rank failed with.
            judge: Raises a `CheckpointError` to fail everyone alike.
            combine: See `Combining`; what it returns is bounded, too.

        Raises:
            CheckpointError: The same on every rank: what a rank brought or a function raised, or `RankMissingError`
                naming the ranks that did not arrive.
        """
        self._meetings, self._sealed = self._meetings + 1, False
        wire = to_wire(message, phase, self.rank)
        if self.store is None:
            whole = wire if "failed" in wire else combined([wire["value"]], combine, phase, self.rank)
            verdict = judged(whole, judge, phase)
        else:
            self._last = self._enter(self.store, phase, self._meetings)
            verdict = self._last.meet(wire, judge, combine)
        if "failed" in verdict:
            self.end()
            raise CheckpointError.from_wire(verdict["failed"])
        return verdict["value"]

    def _enter(self, store: dist.Store, phase: str, number: int) -> Meeting:
        name = f"{self.name}/{number}"
        limit, signs, begun = self.time_limit, self._signs, self._begun if number == 1 else None
        return Meeting(store, name, phase, self.rank, self.world_size, limit, signs, lambda: self.on_beat(), begun)

    def end(self) -> None:
        """After the last meeting: rank 0 stays until the others have read the verdict.  An error is a last word too."""
        if self._last is not None:
            self._last.leave()

    def seal(self) -> None:
        """Before a judge does what cannot be undone: from here on the others wait for it.

        Raises:
            CheckpointError: What the others raised, if they gave up meanwhile.
        """
        if self._last is not None:
            self._last.seal()
        self._sealed = True

    def was_sealed(self) -> bool:
        """Whether the last meeting was sealed, as far as this rank can tell: what it was about may be done."""
        return self._sealed or (self._last is not None and self._last.was_sealed())

    @property
    def has_stopped(self) -> bool:
        """Whether this rank is stuck in its storage; of another thread."""
        return self._signs.has_stopped

    def beat(self) -> None:
        """After each step of long work: others waiting for this rank begin their limit anew.  Cheap to call."""
        self.on_beat()
        self._signs.give()

    def watch(self) -> Watch:
        """For a wait outside a meeting: tells when the time limit has passed without a sign of life of any rank."""
        return Watch(self._signs, self.time_limit)

    def at_work(self) -> AbstractContextManager[None]:
        """Around all that touches storage between meetings, on any rank: a call that takes long is no silence.

            with agreement.at_work():
                for item in items:
                    write(item)         # may block for up to the storage limit
                    agreement.beat()    # a step is done: that limit, too, begins anew

        A judge is inside one already, and blocks may be nested.  Leave out what waits for other ranks, or for nothing
        of the storage's: who is stuck there is to be named within the time limit.
        """
        return self._signs.at_work()


def next_agreement(
    purpose: str, time_limit: float = DEFAULT_TIME_LIMIT, storage_limit: float = DEFAULT_STORAGE_LIMIT
) -> Agreement:
    """The next sequence of meetings of all ranks of this job.  Every rank calls it once a save or load, first thing.

    Args:
        purpose: What for, and where: "save to /checkpoints/iter_0000010".
        time_limit: See `Agreement`.
        storage_limit: See `Agreement`.

    Raises:
        ConfigurationError: A limit is not positive, or the ranks begin different things.
        RankMissingError: The store does not answer.
    """
    check_limits(time_limit, storage_limit)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(purpose, 0, 1, time_limit)
    store, rank = default_store(), dist.get_rank()
    try:
        name = next_name(store, rank, "agreements")
        agreement = Agreement(name, rank, dist.get_world_size(), time_limit, store, storage_limit)
        agreement.begin(purpose)
    except STORE_ERRORS as error:
        raise lost(error, purpose, rank) from error
    return agreement


def check_limits(time_limit: float, storage_limit: float) -> None:
    """Refuse limits that cannot be meant.

    Raises:
        ConfigurationError: One is not positive.
    """
    for name, limit, usual in (
        ("time", time_limit, DEFAULT_TIME_LIMIT),
        ("storage", storage_limit, DEFAULT_STORAGE_LIMIT),
    ):
        if not limit > 0:
            raise ConfigurationError(
                expected=f"a positive {name} limit in seconds",
                found=str(limit),
                remedy=f"Set {name}_limit to {usual:g}, say.",
            )


def next_name(store: dist.Store, rank: int, kind: str) -> str:
    """The name of the next sequence of a kind: all ranks come to the same one, if they begin the same things in order.

    It is counted in the store: a new process group starts anew.
    """
    job = f"mbridge_fsdp_ckpt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    number = store.add(f"{job}/{rank}/{kind}", 1)
    if number == 1:
        store.set(f"{HOSTS}/{rank}", socket.gethostname())
    return f"{job}/{kind}/{number}"


def default_store() -> dist.Store:
    """The rendezvous store of the default process group (torch 2.13 `distributed_c10d._get_default_store`)."""
    from torch.distributed import distributed_c10d

    store: dist.Store = distributed_c10d._get_default_store()
    return store

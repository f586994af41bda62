# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Meetings of real processes in a real store: seconds, requests, and what the store is busy for.

Every rank is a process, forked from one that has imported torch, with a connection of its own to one `TCPStore`, which
is a process, too.  Ranks meet again and again; a meeting lasts until all have its decision.  Each brings a fingerprint
of 256 numbers, as in a save's first meeting.  All share this machine's cores, the store included: in a job the clients
have cores of their own, and what counts is how long the store is busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from benchmarks.harness import Benchmark, Found, Say, positive, table
from benchmarks.scale import polling
from mbridge_fsdp_ckpt.coordination.coordination import Coordination
from mbridge_fsdp_ckpt.coordination.rounds import Round
from mbridge_fsdp_ckpt.coverage.buckets import BUCKETS, added
from mbridge_fsdp_ckpt.plan.tiling import PRIME

RANKS = 64, 256, 1024
PREDICTED = 4096, 16_384
_LIMIT_S = 300.0

Protocol = Literal["tree", "polling"]
PROTOCOLS: tuple[Protocol, ...] = "tree", "polling"


@dataclass(frozen=True, slots=True)
class Measured:
    """Meetings of one protocol with so many ranks.

    Args:
        protocol: Which.
        ranks: How many.
        seconds: Median of the meetings.
        of_rank: Requests of a rank a meeting: half of the ranks make at most so many.
        of_most: Of the rank that makes most.
        of_all: Of all ranks together.
        busy: CPU seconds of the store's process a meeting.
    """

    protocol: Protocol
    ranks: int
    seconds: float
    of_rank: float
    of_most: float
    of_all: float
    busy: float

    @property
    def a_second(self) -> float:
        """Requests that the store answered."""
        return self.of_all / self.seconds


class Counted:
    """A connection to the store that counts requests."""

    def __init__(self, port: int) -> None:
        limit = timedelta(seconds=_LIMIT_S)
        self.store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False)
        self.requests = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            self.requests[name] += 1
            return getattr(self.store, name)(*arguments)

        return request


def _meet(size: int, repeats: int) -> list[Measured]:
    """Meetings of one number of ranks; one more than are asked for, the first, is not counted."""
    repeats += 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        server = _forked(partial(_serve, folder))
        try:
            port = int(_text_of(folder / "port"))
            attend = partial(_attend, folder, size, port, repeats)
            clients = [_forked(partial(attend, rank)) for rank in range(size)]
            failed = [rank for rank, client in enumerate(clients) if os.waitpid(client, 0)[1]]
        finally:
            (folder / "over").touch()
            os.waitpid(server, 0)
        if failed:
            raise RuntimeError(f"ranks {failed[:8]} of {size} failed")
        return [_of_protocol(folder, protocol, size, repeats) for protocol in PROTOCOLS]


def _of_protocol(folder: Path, protocol: Protocol, size: int, repeats: int) -> Measured:
    seen = [json.loads((folder / f"{protocol}_{rank}").read_text()) for rank in range(size)]
    lasts = list(map(max, zip(*(one["ends"] for one in seen), strict=True)))
    seconds = statistics.median(end - begin for begin, end in pairwise(lasts))
    requests = [one["requests"] / (repeats - 1) for one in seen]
    first, last = (json.loads((folder / f"busy_{protocol}_{when}").read_text()) for when in ("first", "last"))
    of_rank, busy = statistics.median(requests), (last - first) / (repeats - 1)
    return Measured(protocol, size, seconds, of_rank, max(requests), sum(requests), busy)


def _forked(action: Callable[[], None]) -> int:
    """The process that does it, and nothing else."""
    process = os.fork()
    if process:
        return process
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(folder: Path) -> None:
    """The store, and its CPU seconds when the first meeting of a protocol was over and when the last was."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _write(folder / "port", str(store.port))
    for name in (f"{protocol}_{when}" for protocol in PROTOCOLS for when in ("first", "last")):
        while not ((folder / f"seen_{name}").exists() or (folder / "over").exists()):
            time.sleep(0.005)
        _write(folder / f"busy_{name}", json.dumps(time.process_time()))
    while not (folder / "over").exists():
        time.sleep(0.01)


def _attend(folder: Path, size: int, port: int, repeats: int, rank: int) -> None:
    store = Counted(port)
    coordination = Coordination("scale", rank, size, _LIMIT_S, store)
    message = [(rank + 1) * bucket * 0x9E3779B97F4A7C15 % PRIME for bucket in range(BUCKETS)]

    def tree(number: int) -> None:
        coordination.meet(_Sums(f"meeting {number}", message))

    def poll(number: int) -> None:
        polling.meet(store, f"polled/{number}", rank, size, message, lambda all_of: _bad(added(all_of)))

    for protocol, meet in zip(PROTOCOLS, (tree, poll), strict=True):
        ends = []
        for number in range(repeats):
            meet(number)
            ends.append(time.monotonic())
            if not number:
                store.requests.clear()  # the first begins when its processes do
            if rank == 0 and number in (0, repeats - 1):
                (folder / f"seen_{protocol}_{'last' if number else 'first'}").touch()
        _write(folder / f"{protocol}_{rank}", json.dumps({"ends": ends, "requests": store.requests.total()}))


@dataclass
class _Sums(Round[list[int], int]):
    """As in a save's first meeting."""

    phase: str
    fingerprint: list[int]

    def message(self) -> list[int]:
        return self.fingerprint

    def combine(self, messages: list[list[int]]) -> list[int]:
        return added(messages)

    def decide(self, whole: list[int]) -> int:
        return _bad(whole)


def _bad(fingerprint: list[int]) -> int:
    return sum(map(bool, fingerprint))


def _write(path: Path, text: str) -> None:
    written = path.with_suffix(".written")
    written.write_text(text)
    written.rename(path)


def _text_of(path: Path) -> str:
    until = time.monotonic() + _LIMIT_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return path.read_text()


def predicted(found: Sequence[Measured], protocol: Protocol, ranks: int) -> tuple[float, float]:
    """Requests of a meeting of so many ranks, and the seconds for which the store is busy with them.

    Each by what a rank adds: a line through zero, with the least squares.
    """
    points = [one for one in found if one.protocol == protocol]
    of_one = sum(one.of_all * one.ranks for one in points) / sum(one.ranks**2 for one in points)
    a_request = sum(one.busy * one.of_all for one in points) / sum(one.of_all**2 for one in points)
    return of_one * ranks, of_one * ranks * a_request


def _body(found: Found) -> list[str]:
    """What was measured, and what more ranks would make the store do."""
    measured: list[Measured] = found["measured"]
    rows = (
        [
            f"{one.ranks:,}",
            one.protocol,
            f"{one.seconds:.3f}",
            f"{one.of_rank:.0f}",
            f"{one.of_most:.0f}",
            f"{one.a_second:,.0f}",
            f"{one.busy:.3f}",
        ]
        for one in measured
    )
    head = ["ranks", "protocol", "seconds a meeting", "requests a rank", "of the rank with most"]
    lines = table([*head, "requests a second", "the store is busy, s"], rows)
    lines += ["\nBy the cost of a request, what more ranks would make the store do in a meeting on the tree:\n"]
    more = ((ranks, *predicted(measured, "tree", ranks)) for ranks in PREDICTED)
    cells = ([f"{ranks:,}", f"{requests:,.0f}", f"{busy:.2f}"] for ranks, requests, busy in more)
    return [*lines, *table(["ranks", "requests", "the store is busy, s"], cells)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS, help="sizes of the job")


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    """Both protocols with each number of ranks, one after the other in the same processes."""
    gc.collect()
    gc.freeze()  # what is forked shares its memory
    found: list[Measured] = []
    for size in arguments.ranks:
        for measured in _meet(size, arguments.repeats):
            found.append(measured)
            say(f"{size} ranks, {measured.protocol}: {measured.seconds:.3f} s a meeting")
        yield {"measured": found}


BENCHMARK = Benchmark(
    command="python -m benchmarks.scale meetings",
    name="scale_meetings",
    title="Meetings of many ranks",
    about=__doc__,
    measure=_measure,
    body=_body,
    options=_options,
    repeats=8,
)

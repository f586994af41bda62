# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What the ranks of a check are told, and what they find."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Options:
    """What every rank is told.

    Args:
        cpu: Whether to run on CPU ranks over gloo.
        size: Bytes of state, over all ranks, of the large save.
        disk: A folder of a local disk.
        memory: A folder in memory.
        limit: Seconds that a rank has from its start.
        found: Where rank 0 writes what was found.
    """

    cpu: bool
    size: int
    disk: str
    memory: str
    limit: float
    found: str

    def text(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Job:
    """One rank's part in the check.

    Args:
        options: What it was told.
        deadline: When its time is up, by `time.monotonic`.
        failures: Comparisons that failed; the same on every rank.
        not_run: What was left out, and why.
        sections: Figures, by section.
        seconds: What each section took.
    """

    options: Options
    deadline: float
    failures: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until its time is up."""
        return self.deadline - time.monotonic()

    def expect(self, what: str, holds: bool) -> None:
        """Note a failure on all ranks where it does not hold on one."""
        ranks = [rank for rank, held in enumerate(gathered(holds)) if not held]
        if ranks:
            self.failures.append(f"{what}: not on rank {', '.join(map(str, ranks))}")

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """What it returns; if it raises, that is a failure on all ranks, and the check goes on with what comes next."""
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        errors = [(rank, text) for rank, text in enumerate(gathered(error)) if text is not None]
        if errors:
            self.failures.append(f"{what}: rank {errors[0][0]} raised {errors[0][1]}")
        return result

    def refused(self, what: str, why: str | None) -> bool:
        """Whether a rank has a reason not to run something: it is noted, and no rank runs it."""
        reasons = [reason for reason in gathered(why) if reason is not None]
        if reasons:
            self.not_run[what] = reasons[0]
        return bool(reasons)

    def write(self) -> None:
        """Let what was found so far outlive this process; rank 0 does."""
        if dist.get_rank() == 0:
            found = {
                "failures": self.failures,
                "not_run": self.not_run,
                "section_seconds": self.seconds,
                "sections": self.sections,
            }
            path = Path(self.options.found)
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").replace(path)


def gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seconds_of(action: Callable[[], object]) -> float:
    """How long it takes, all that it queues on the device included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def rate(size: int, seconds: float) -> dict[str, float]:
    """Bytes, seconds, and GB (1e9 bytes) a second."""
    return {"bytes": size, "seconds": round(seconds, 4), "gb_per_s": round(size / 1e9 / max(seconds, 1e-9), 4)}

"""What is asked of a save beside the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.coordination.delegated import Seat
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.snapshot import Prepared, Seen, plan_save
from mbridge_fsdp_ckpt.settings import Settings

_DOING = "planning the save"


@dataclass(frozen=True, slots=True)
class Still:
    """What is saved: values as they were at the call, and what the optimizer's next step changes.

    Args:
        seen: With copies of buffers.
        values: `Order.values` on rank 0, encoded.
    """

    seen: Seen
    values: Json


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The same, planned.

    Args:
        prepared: What this rank writes.
        values: See `Still`.
    """

    prepared: Prepared
    values: Json


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Order:
    """A save to be done beside the training.

    Args:
        directory: Where to, as all ranks call it.
        seat: This rank's, in the meetings.
        settings: See `Settings`.
        values: See `checkpoint.save`.
        seen: What this rank saves, or why it can't.
        phases: The clock of the save.
        add_files: See `checkpoint.save`.
        after_commit: See `checkpoint.save`.
        working: Where the training process works at the call; empty where that directory was removed.
    """

    directory: str
    seat: Seat
    settings: Settings
    values: Mapping[str, Any]
    seen: Outcome[Seen]
    phases: Phases
    add_files: Callable[[Path], None] | None
    after_commit: Callable[[], None] | None
    working: str = field(default_factory=_working_directory)

    def held_still(self) -> Outcome[Still]:
        """What may change before an optimizer steps, as it is now."""
        return self.seen.then(self._still, self.seat.rank, _DOING)

    def _still(self, seen: Seen) -> Still:
        values = encode_mapping(self.values, "values") if self.seat.rank == 0 else None
        return Still(seen.held_still(), values)

    def planned(self, still: Outcome[Still]) -> Outcome[Snapshot]:
        """Plan it, before an optimizer steps.  Of the thread that copies."""
        with self.phases("plan"):
            return still.then(lambda own: Snapshot(plan_save(own.seen), own.values), self.seat.rank, _DOING)

"""What is asked of a save beside the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.agree.elsewhere import Seat
from mbridge_fsdp_ckpt.agree.outcome import Outcome
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.snapshot import Prepared
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.storage.files import Json
from mbridge_fsdp_ckpt.storage.format.values import encode


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is saved: values as they were at the call, and tensors, numbers too, that the optimizer's next step changes.

    Args:
        prepared: With copies of buffers: a forward pass may change them.
        values: `Order.values` on rank 0, encoded.
    """

    prepared: Prepared
    values: Json


@dataclass(frozen=True, slots=True)
class Order:
    """A save to be done beside the training.

    Args:
        directory: Where to, as all ranks call it.
        seat: This rank's, in the meetings.
        settings: See `Settings`.
        values: See `checkpoint.save`.
        prepared: What this rank saves, or why it can't.
        phases: The clock of the save.
        add_files: See `checkpoint.save`.
        after_commit: See `checkpoint.save`.
    """

    directory: str
    seat: Seat
    settings: Settings
    values: Mapping[str, Any]
    prepared: Outcome[Prepared]
    phases: Phases
    add_files: Callable[[Path], None] | None
    after_commit: Callable[[], None] | None

    def snapshot(self) -> Outcome[Snapshot]:
        """What is saved, but for tensors that only an optimizer's step changes."""
        return self.prepared.then(self._snapshot, self.seat.rank, "planning the save")

    def _snapshot(self, prepared: Prepared) -> Snapshot:
        held = [item._replace(flat=item.flat.clone()) if item.is_buffer else item for item in prepared.holdings]
        values = encode(dict(self.values), "values") if self.seat.rank == 0 else None
        return Snapshot(replace(prepared, holdings=held), values)

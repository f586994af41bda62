# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What is asked of an asynchronous save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mbridge_fsdp_ckpt.coordination.delegated import Participant
from mbridge_fsdp_ckpt.coordination.outcome import Outcome
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.phases import Phases
from mbridge_fsdp_ckpt.saving.snapshot import Observed, Prepared, plan_save
from mbridge_fsdp_ckpt.settings import Settings

_DOING = "planning the save"


@dataclass(frozen=True, slots=True)
class Frozen:
    """What is saved: values as they were at the call, and what the optimizer's next step changes.

    Args:
        observed: What is saved, with copies of buffers.
        values: `Observed.values` on rank 0, encoded.
    """

    observed: Observed
    values: Json


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The same, planned.

    Args:
        prepared: What this rank writes, planned.
        values: `Order.values` on rank 0, encoded.
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
    """A save to be done asynchronously.

    Args:
        directory: The directory to save to, spelled alike on all ranks.
        participant: This rank's, in the meetings.
        settings: The settings of this save.
        observed: What this rank saves, or the error that it failed with.
        phases: The clock of the save.
        add_files: Puts files of the caller into an empty folder, on rank 0; None where there are none.
        after_commit: Called on rank 0 once the checkpoint is in its place.
        working: The training process's working directory at the call; empty if it was removed.
    """

    directory: str
    participant: Participant
    settings: Settings
    observed: Outcome[Observed]
    phases: Phases
    add_files: Callable[[Path], None] | None
    after_commit: Callable[[], None] | None
    working: str = field(default_factory=_working_directory)

    def frozen(self) -> Outcome[Frozen]:
        """What may change before an optimizer steps, as it is now."""
        return self.observed.then(self._freeze, self.participant.rank, _DOING)

    def _freeze(self, observed: Observed) -> Frozen:
        values = encode_mapping(observed.values, "values") if self.participant.rank == 0 else None
        return Frozen(observed.with_buffers_copied(), values)

    def planned(self, frozen: Outcome[Frozen]) -> Outcome[Snapshot]:
        """Plan it, before an optimizer steps.  Of the thread that copies."""
        with self.phases("plan"):
            return frozen.then(lambda own: Snapshot(plan_save(own.observed), own.values), self.participant.rank, _DOING)

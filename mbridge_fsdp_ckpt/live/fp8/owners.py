# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 scaling state in a checkpoint: who writes which module's, and whose a rank restores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mbridge_fsdp_ckpt.live.fp8 import state as extra_state
from mbridge_fsdp_ckpt.live.readers.protocol import Reader


class Saved(Protocol):
    """The fields of a saving rank's record that are used here."""

    @property
    def coordinates(self) -> Mapping[str, int]:
        """The rank's place along each axis of the job."""

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """What `own_states` returned on that rank; empty if it returned None."""


_STATES, _OPEN = "states", "open_rows"


def own_states(reader: Reader, parts: Iterable[Any]) -> Mapping[str, Mapping[str, extra_state.State]] | None:
    """What this rank writes: states that no earlier replica writes, and every history's row that waits to be reduced.

    Args:
        reader: Of the model.
        parts: The modules that it is made of.

    Returns:
        None where nothing scales with delay.
    """
    if not extra_state.may_have_some(parts):
        return None
    naming, written, every = reader.naming, dict[str, extra_state.State](), dict[str, extra_state.State]()
    for name, part in reader.module.named_modules():
        states = extra_state.collect([(name, part)], naming.on_disk)
        if not states:
            continue
        every |= states
        replica = reader.whole(f"{name}.weight", ()).replica
        if replica.index == 0 or not extra_state.replicas_agree(part, replica.count):
            written |= states
    return {_STATES: written, _OPEN: extra_state.open_rows(every)} if every else None


def restorations(reader: Reader, saved: Callable[[Iterable[str]], Iterable[Saved]]) -> list[extra_state.Restoration]:
    """Checked states for this rank's modules, to be applied once nothing can fail any more.

    Where data-parallel ranks keep amaxes of their own, each gets those of the rank at its place, if there is one.

    Args:
        reader: Of the live model.
        saved: Finds the saving ranks that have states of some modules, each with what `own_states` returned there.

    Raises:
        LayoutError: A state is malformed or does not fit its module.
    """
    place, naming = reader.job.place, reader.naming
    states: dict[str, extra_state.State] = {}
    rows: dict[str, list[Any]] = {}
    asked = extra_state.names(reader.module.named_modules(), naming.on_disk)
    for record in sorted(saved(asked), key=lambda rank: _nearness(rank.coordinates, place)):  # the nearest comes last
        states |= record.extra_state.get(_STATES, {})
        for key, row in record.extra_state.get(_OPEN, {}).items():
            rows.setdefault(key, []).append(row)
    checked = {key: extra_state.check(key, state) for key, state in states.items()}
    complete = {key: extra_state.with_open_rows(key, state, rows.get(key, ())) for key, state in checked.items()}
    return extra_state.find_restorations(reader.module.named_modules(), complete, naming.on_disk)


def _nearness(coordinates: Mapping[str, int], place: Mapping[str, int]) -> tuple[bool, bool]:
    return coordinates.get("data") == place.get("data"), dict(coordinates) == dict(place)

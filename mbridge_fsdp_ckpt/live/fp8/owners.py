# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 scaling state in a checkpoint: who writes which module's, and whose a rank restores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.live.fp8 import state as extra_state
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import naming_of
from mbridge_fsdp_ckpt.live.topology import coordinates, replicas


class Saved(Protocol):
    """What one saving rank said of itself, as far as it is asked here."""

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Its place."""

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """What `own_states` returned there; empty where that was nothing."""


_STATES, _OPEN = "states", "open_rows"


def own_states(module: Any, parts: Iterable[Any]) -> Mapping[str, Mapping[str, extra_state.State]] | None:
    """What this rank writes: states that no earlier replica writes, and every history's row that waits to be reduced.

    Args:
        module: A `MegatronFSDP` module.
        parts: `parts_of` it.

    Returns:
        None where nothing scales with delay.
    """
    if not extra_state.may_have_some(parts):
        return None
    naming, written, every = naming_of(module), dict[str, extra_state.State](), dict[str, extra_state.State]()
    for name, part in module.named_modules():
        states = extra_state.collect([(name, part)], naming.on_disk)
        if not states:
            continue
        every |= states
        replica = replicas(expert=is_expert_name(f"{name}.weight"))
        if replica.index == 0 or not extra_state.replicas_agree(part, replica.count):
            written |= states
    return {_STATES: written, _OPEN: extra_state.open_rows(every)} if every else None


def restorations(module: Any, saved: Callable[[Iterable[str]], Iterable[Saved]]) -> list[extra_state.Restoration]:
    """Checked states for this rank's modules, to be applied once nothing can fail any more.

    Where data-parallel ranks keep amaxes of their own, each gets those of the rank at its place, if there is one.

    Args:
        module: The live model's `MegatronFSDP` module.
        saved: Finds the saving ranks that have states of some modules, each with what `own_states` returned there.

    Raises:
        LayoutError: A state is malformed or does not fit its module.
    """
    place, naming = coordinates(), naming_of(module)
    states: dict[str, extra_state.State] = {}
    rows: dict[str, list[Any]] = {}
    asked = extra_state.names(module.named_modules(), naming.on_disk)
    for record in sorted(saved(asked), key=lambda rank: _nearness(rank.coordinates, place)):  # the nearest comes last
        states |= record.extra_state.get(_STATES, {})
        for key, row in record.extra_state.get(_OPEN, {}).items():
            rows.setdefault(key, []).append(row)
    checked = {key: extra_state.check(key, state) for key, state in states.items()}
    complete = {key: extra_state.with_open_rows(key, state, rows.get(key, ())) for key, state in checked.items()}
    return extra_state.find_restorations(module.named_modules(), complete, naming.on_disk)


def _nearness(coordinates: Mapping[str, int], place: Mapping[str, int]) -> tuple[bool, bool]:
    return coordinates.get("data") == place.get("data"), dict(coordinates) == dict(place)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a stock `fsdp_dtensor` checkpoint says besides tensors, in this format's terms.

Nothing but data comes out of its pickles: torch's `weights_only` loader reads them, and what the format cannot hold is
refused, or named as left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, UnsupportedStateError
from mbridge_fsdp_ckpt.format.names import ARGUMENTS
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.format.values import encode, encode_mapping
from mbridge_fsdp_ckpt.integrations.bridge.run_config import RunConfig
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.tools.convert.description import Description, Parameters, Record
from mbridge_fsdp_ckpt.versions import writer_versions

_MODEL, _OPTIMIZER, _RANDOM = "model", "optimizer", "rng_state"
_GROUP_META = "param_to_group_meta"


def describe_stock(source: DcpSource) -> Description:
    """A checkpoint that Bridge wrote alone.

    The index file of rank i gets the random-number states of the i-th (pipeline, tensor) place.

    Raises:
        UnsupportedStateError: An optimizer slot is a pickle.
        DamagedCheckpointError, ManifestError: It contradicts itself, or is no data.
    """
    _refuse_pickled_slots(source)
    values, unread = _values(source)
    parameters = Parameters()
    hyperparameters = _hyperparameters(source)
    for name, found in hyperparameters.items():
        where = f"{_OPTIMIZER}.{_GROUP_META}.{name}"
        parameters.add([name], encode_mapping(found, where))
    places = sorted(source.ranks(), key=lambda record: (record.coordinates["pipeline"], record.coordinates["tensor"]))
    records = {
        index: Record({"rank": index, **place.coordinates}, RankOwn(values=encode_mapping(place.values, _RANDOM)))
        for index, place in enumerate(places)
    }
    lost = [*unread, *_lost(source, hyperparameters)]
    return Description(
        keys=source.metadata.keys,
        sections=source.metadata.sections,
        topology=topology_of(source.metadata.directory, [*records.values()]),
        values=encode_mapping(values, "values"),
        records=records,
        parameters=parameters,
        writer=writer_versions(training=False),
        notes=(*_note(lost), *note_of_arguments(values)),
    )


def _note(lost: list[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    count = "1 entry is" if len(lost) == 1 else f"{len(lost)} entries are"
    names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
    return (f"{count} left out, being no plain data, or nothing that a load reads: {names}",)


def note_of_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on which of Megatron-LM's arguments, saved as one pickle, are converted; none if there are none."""
    if ARGUMENTS not in values:
        return ()
    kept = ", ".join(values[ARGUMENTS]) or "none"
    return (f"of Megatron-LM's arguments ({ARGUMENTS}) only what a load reads comes along: {kept}",)


def _refuse_pickled_slots(source: DcpSource) -> None:
    for key in source.entries:
        if key.startswith(f"{_OPTIMIZER}.state.") and key not in source.metadata.keys:
            raise UnsupportedStateError(
                expected="optimizer state that is tensors",
                found="a pickled object",
                remedy="Resume from the stock checkpoint with this package and save once, instead of converting it.",
                key=key,
            )


def _hyperparameters(source: DcpSource) -> dict[str, dict[str, Any]]:
    paths = source.entries.values()
    return source.hyperparameters({str(path[2]) for path in paths if path[:2] == (_OPTIMIZER, _GROUP_META)})


def _values(source: DcpSource) -> tuple[dict[str, Any], list[str]]:
    """Non-tensor state that belongs to no rank, and the names of what is no plain data."""
    values, unread = dict(source.metadata.values), []
    roots = {str(path[0]) for path in source.entries.values() if path}
    for root in sorted(roots - {_MODEL, _OPTIMIZER, _RANDOM, *values}):
        try:
            found = source.read_values(root)
            encode(found, root)
        except (DamagedCheckpointError, UnsupportedStateError):
            unread.append(root)
        else:
            values |= found
    return values, unread


def _lost(source: DcpSource, hyperparameters: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Entries of model and optimizer that are neither tensors nor hyperparameters that were read."""
    for key, path in source.entries.items():
        if key in source.metadata.keys or (path and path[0] not in (_MODEL, _OPTIMIZER)):
            continue
        is_hyperparameter = len(path) > 3 and path[:2] == (_OPTIMIZER, _GROUP_META)
        if not is_hyperparameter or path[3] not in hyperparameters.get(str(path[2]), {}):
            yield key


def topology_of(directory: AnyPath, records: Sequence[Record]) -> dict[str, int | str]:
    """Sizes of the job that saved, as far as its run configuration and its random-number states tell.

    Args:
        directory: The checkpoint.
        records: Those that have the coordinates of a (pipeline, tensor) place each.
    """
    config = RunConfig.read(directory)
    sizes: dict[str, int | str] = {**config.sizes()}
    for axis in ("tensor", "pipeline"):  # one state a place: the places tell the sizes
        sizes |= {axis: 1 + max(places)} if (places := [record.coordinates[axis] for record in records]) else {}
    return {**sizes, "strategy": config.strategy} if config.strategy else sizes

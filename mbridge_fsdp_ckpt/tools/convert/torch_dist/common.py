# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Non-tensor state of Megatron's `torch_dist` checkpoints, read as data: no pickle of it runs code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.dcp.unpickler import REMEDY, load_state
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, UnsupportedStateError, brief
from mbridge_fsdp_ckpt.format.kinds import TORCH_DIST_COMMON
from mbridge_fsdp_ckpt.format.names import ARGUMENTS, KEPT_ARGUMENTS, PROGRESS
from mbridge_fsdp_ckpt.format.schema import RankOwn
from mbridge_fsdp_ckpt.format.values import encode
from mbridge_fsdp_ckpt.io.files import is_plain_file, read_bounded
from mbridge_fsdp_ckpt.io.ranges import Bytes, OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.tools.convert.description import Record
from mbridge_fsdp_ckpt.tools.convert.torch_dist.reader import TORCH_DIST

_COMMON_KEY = "common_state/shard_0_1"
_MAX_COMMON_BYTES = 1 << 30
_PLAIN = (bool, int, float, str, type(None))
_BY_PARAMETER = frozenset({"fully_reshardable", "fully_sharded_model_space"})
_RANDOM = re.compile(r"rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_[\d.]+")


@dataclass(frozen=True, slots=True)
class Common:
    """Non-tensor state of a `torch_dist` checkpoint.

    Args:
        content: What it says of its own structure.
        values: Progress, scheduler and the like.
        groups: The optimizer's param groups.
        sharding: How the optimizer's state was saved; empty where there is none.
        left_out: Names of state that is no plain data.
        arguments: Megatron-LM's, all of them; empty where Bridge saved.
    """

    content: Mapping[str, Any]
    values: Mapping[str, Any]
    groups: Sequence[dict[str, Any]]
    sharding: frozenset[str]
    left_out: tuple[str, ...]
    arguments: Mapping[str, Any]

    @property
    def no_optimizer(self) -> str:
        """Why there is no optimizer state that goes by parameter; empty where there is."""
        if not self.sharding:
            return "the checkpoint has no optimizer state: weights only"
        if self.sharding <= _BY_PARAMETER:
            return ""
        return (
            f"optimizer state is left out: {', '.join(sorted(self.sharding))} keeps it by ranks' buffers, not by "
            "parameters. Save once with dist_ckpt_optim_fully_reshardable=True to convert it"
        )


class TorchDistSource(DcpSource):
    """A checkpoint of `torch_dist`: torch's files, as stock's are, with non-tensor state of another kind.

    Raises:
        ManifestError, DamagedCheckpointError: It cannot be read.
    """

    def __init__(self, directory: AnyPath) -> None:
        super().__init__(directory)
        self.common = read_common(self)
        self.metadata = replace(self.metadata, format=TORCH_DIST, values=self.common.values)


def read_common(source: DcpSource) -> Common:
    """The non-tensor state, through torch's `weights_only` loader; of Megatron-LM's arguments what a load reads.

    Raises:
        DamagedCheckpointError: It is no data, or damaged.
        ManifestError: It is not there.
    """
    state = read_state(source)
    values, left_out = {}, []
    for name, value in state.items():
        if name in ("optimizer", "content_metadata"):
            continue
        if name == ARGUMENTS and isinstance(value, dict):
            value = {kept: value[kept] for kept in KEPT_ARGUMENTS if kept in value and type(value[kept]) in _PLAIN}
        try:
            encode(value, name)
            values[name] = value
        except UnsupportedStateError:
            left_out.append(name)
    if PROGRESS in source.metadata.values:  # in a file beside, as in stock's
        values[PROGRESS] = source.metadata.values[PROGRESS]
    parts = [part for part in _optimizers(state.get("optimizer")) if isinstance(part, dict)]
    inner = [part.get("optimizer") or {} for part in parts]
    return Common(
        content=state.get("content_metadata") or {},
        values=values,
        groups=[dict(group) for one in inner if isinstance(one, dict) for group in one.get("param_groups", ())],
        sharding=frozenset(str(part.get("param_state_sharding_type", "unknown")) for part in parts),
        left_out=tuple(left_out),
        arguments=state[ARGUMENTS] if isinstance(state.get(ARGUMENTS), dict) else {},
    )


def read_state(source: DcpSource) -> dict[str, Any]:
    """The same as Megatron saved it, in a file beside or among the tensors.

    Raises:
        DamagedCheckpointError, ManifestError: See `read_common`.
    """
    if is_plain_file(source.metadata.directory / TORCH_DIST_COMMON):
        return read_common_file(source.metadata.directory)
    if _COMMON_KEY in source.tensors:
        raise _no_common(source.metadata.directory, "a tensor")
    [chunk] = source.look_at(_COMMON_KEY)
    return _loaded(chunk.path, OpenFiles().read(chunk.path, *chunk.record))


def read_common_file(directory: AnyPath) -> dict[str, Any]:
    """What the file beside a `torch_dist` checkpoint has, as older releases wrote it.

    Raises:
        DamagedCheckpointError: It is no data, or damaged.
    """
    path = directory / TORCH_DIST_COMMON
    return _loaded(path, np.frombuffer(read_bounded(path, _MAX_COMMON_BYTES), dtype=np.uint8))


def _loaded(path: AnyPath, data: Bytes) -> dict[str, Any]:
    try:
        return load_state(data)
    except Exception as error:  # a pickle stream can raise anything
        raise _no_common(path, brief(error)) from error


def _no_common(path: AnyPath, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        expected="the non-tensor state as Megatron saves it", found=found, remedy=REMEDY, key=str(path)
    )


def _optimizers(state: Any) -> list[Any]:
    """One, or several chained, which are numbered."""
    if not isinstance(state, dict) or not state:
        return []
    return list(state.values()) if all(isinstance(name, int) for name in state) else [state]


def read_random_states(source: DcpSource) -> tuple[dict[int, Record], list[str]]:
    """Random-number states, one for each (pipeline, tensor) place, as stock keeps them; and what is left out.

    Raises:
        DamagedCheckpointError: They are no data.
    """
    found: dict[tuple[int, int], Any] = {}
    others = 0
    for key in source.entries:
        match = _RANDOM.fullmatch(key)
        if match is None:
            continue
        pipeline, tensor, data = (int(number or 0) for number in match.groups())
        if data:
            others += 1
        else:
            states = source.read_object(key)
            found[pipeline, tensor] = states[0] if _is_nested(states) else states
    records = {
        index: Record(
            {"rank": index, "pipeline": pipeline, "tensor": tensor},
            RankOwn(values=encode({"rng_state": {f"({pipeline}, {tensor})": found[pipeline, tensor]}}, "rng_state")),
        )
        for index, (pipeline, tensor) in enumerate(sorted(found))
    }
    if not others:
        return records, []
    ranks = "1 rank" if others == 1 else f"{others} ranks"
    note = f"random-number states of {ranks} are left out: one for each (pipeline, tensor) place is kept"
    return records, [note]


def _is_nested(states: Any) -> bool:
    """Megatron keeps each object in a list of its own."""
    return isinstance(states, list) and len(states) == 1 and isinstance(states[0], list)

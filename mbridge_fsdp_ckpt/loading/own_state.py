# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What modules keep beside tensors (`live.own_state`): read and checked, to be set when all is filled.

Saved and live modules meet like this:

    saved, and the module is there                          set, whatever it keeps now
    saved, and no such module is there                      an unexpected key
    not saved, and the module keeps something               a missing key
    not saved, and the module keeps nothing                 left as it is

Keys that may be missing, or stay unread, are the user's to name, as for any other key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import UnsupportedStateError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.format.source import CheckpointSource, StoredChunk
from mbridge_fsdp_ckpt.format.values import decode
from mbridge_fsdp_ckpt.io.files import malformed, parse_json
from mbridge_fsdp_ckpt.live.own_state import LARGEST, can_be_set, is_nothing, keys_of, plan_of
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.live.readers.protocol import Reader
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import MODEL_PREFIX, KeyEntry
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan
from mbridge_fsdp_ckpt.remedies import remedy


@dataclass(frozen=True, slots=True)
class Restoration:
    """What a module is going to keep."""

    part: Any
    value: Any

    def apply(self) -> None:
        """Hand it over."""
        self.part.set_extra_state(self.value)


@dataclass(frozen=True, slots=True)
class OwnState:
    """The modules that keep something here or in a checkpoint, by key on disk, and what is read for them."""

    parts: dict[str, Any]
    planned: list[Planned]

    @classmethod
    def find(cls, reader: Reader, plans: Iterable[ParameterPlan], source: CheckpointSource) -> OwnState:
        """Look up every module's.

        Args:
            reader: The reader of the model.
            plans: The plans of the model's parameters.
            source: The checkpoint.

        Raises:
            ManifestError: A key of the checkpoint is none of such state.
        """
        parts, planned = dict[str, Any](), list[Planned]()
        for key, part in keys_of(reader, plans):
            entry = source.metadata.keys.get(f"{MODEL_PREFIX}{key}")
            if entry is None and is_nothing(part.get_extra_state()):
                continue
            tensor = torch.empty(0, dtype=torch.uint8) if entry is None else _room(entry, key, source)
            parts[f"{MODEL_PREFIX}{key}"] = part
            planned.append(Planned(plan_of(key, tensor.shape, reader), tensor, is_buffer=False))
        return cls(parts, planned)

    def restorations(
        self, chunks: dict[str, list[StoredChunk]], asked: Collection[str], source: CheckpointSource, *, verify: bool
    ) -> list[Restoration]:
        """Read what is there.  Nothing is changed.

        Args:
            chunks: All chunks of each key.
            asked: Keys of the checkpoint that are wanted.
            source: The checkpoint.
            verify: Whether to compare checksums.

        Raises:
            UnsupportedStateError: A module takes nothing back.
            CheckpointError, OSError: Bytes are damaged, or cannot be read, or are no value.
        """
        found = []
        for key, part in self.parts.items():
            if key not in asked:
                continue
            if not can_be_set(part):
                raise UnsupportedStateError(
                    expected="a module with set_extra_state, for what the checkpoint has",
                    found=f"{type(part).__name__} without one",
                    remedy=remedy("Add it.", "Or leave the key out with {include}.", "Nothing was changed."),
                    key=key,
                )
            whole = _room(source.metadata.keys[key], key, source)
            for chunk in chunks[key]:
                whole[tuple(slice(*edges) for edges in zip(chunk.box.offset, chunk.box.end, strict=True))] = (
                    source.read(chunk, verify=verify)
                )
            found.append(Restoration(part, _value(whole, key, source)))
        return found


def _room(entry: KeyEntry, key: str, source: CheckpointSource) -> torch.Tensor:
    """A tensor of the size that was saved; of stock, one that a module kept as it is."""
    is_ours = source.metadata.format == FORMAT_NAME
    if entry.nbytes > 2 * LARGEST or (is_ours and (entry.dtype != "uint8" or len(entry.shape) != 1)):
        what = f"{entry.dtype} of shape {list(entry.shape)} for {key}"
        raise malformed(source.metadata.directory, f"extra state of up to {LARGEST} bytes", what)
    return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype))


def _value(whole: torch.Tensor, key: str, source: CheckpointSource) -> Any:
    if source.metadata.format != FORMAT_NAME:
        return whole
    return decode(parse_json(source.metadata.directory / key, whole.numpy().tobytes()))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What is done to copies of good golden checkpoints, and the error that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError, ManifestError, UnsupportedVersionError
from tests.soak import forge

Damage = tuple[str, Callable[[Path], Any], type[CheckpointError]]
"""Of which checkpoint, what is done, what a reader says."""

PAYLOAD, INDEX = "__0_0.distcp", "group_00000.index"


def _change(name: str, change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], Any]:
    return lambda place: (place / name).write_bytes(change(bytearray((place / name).read_bytes())))


def _flip(data: bytearray) -> bytearray:
    """A bit in the middle, of a tensor's elements or of a record around them."""
    data[len(data) // 2] ^= 1
    return data


def _half(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


def _delete(name: str) -> Callable[[Path], Any]:
    return lambda place: (place / name).unlink()


def _newer(body: dict[str, Any]) -> None:
    body["version"] = [body["version"][0] + 1, 0]


def _leave_a_hole(file: forge.Index) -> None:
    """A row is of one element less along its first dimension, and every checksum is right."""
    file["rows"][0]["extent"][0] -= 1


DAMAGES: dict[str, dict[str, Damage]] = {
    "safe": {
        "payload_bit_flipped": ("weights_1_rank", _change(PAYLOAD, _flip), DamagedCheckpointError),
        "payload_truncated": ("weights_1_rank", _change(PAYLOAD, _half), DamagedCheckpointError),
        "payload_missing": ("weights_1_rank", _delete(PAYLOAD), DamagedCheckpointError),
        "index_truncated": ("weights_1_rank", _change(INDEX, _half), DamagedCheckpointError),
        "manifest_missing": ("fused_adam_2_ranks", _delete("manifest.json"), DamagedCheckpointError),
        "newer_major_version": ("weights_1_rank", forge.edit_manifest(_newer), UnsupportedVersionError),
        "elements_missing": ("weights_1_rank", forge.edit_index(_leave_a_hole, INDEX), ManifestError),
    },
    "stock": {
        "payload_truncated": ("torch_adam_1_rank", _change(PAYLOAD, _half), DamagedCheckpointError),
        "metadata_truncated": ("torch_adam_1_rank", _change(".metadata", _half), ManifestError),
    },
}

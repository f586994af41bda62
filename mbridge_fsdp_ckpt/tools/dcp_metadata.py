# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Making DCP metadata of a checkpoint after its save: `.metadata` and the values file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.dcp.writer import write_dcp_view
from mbridge_fsdp_ckpt.errors import ConfigurationError, DamagedCheckpointError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import DCP_METADATA, MANIFEST_NAME
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.schema import Manifest
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.files import replace_file, what_is_there
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.tools.repair import Plan, Step


def plan_view(directory: AnyPath) -> Plan:
    """What it takes to make DCP metadata; changes nothing.

    Raises:
        ConfigurationError: The checkpoint is not of this format.
        CheckpointError: Its metadata or its index is damaged.
    """
    metadata = _missing_view(directory)
    target = directory / DCP_METADATA
    if metadata is None:
        return Plan(left_alone=[(target, "DCP metadata is there")])

    def take() -> None:
        with reading(directory):
            _write_view(directory, metadata)

    return Plan(steps=[Step("write", target, "DCP metadata, made from the manifest and the index", take)])


def _missing_view(directory: AnyPath) -> Manifest | None:
    """The metadata of a checkpoint that stock cannot read yet; None where it can.

    Raises:
        ConfigurationError: It is not of this format.
        CheckpointError: Its metadata or its index is damaged.
    """
    if not (directory / MANIFEST_NAME).exists():
        raise ConfigurationError(
            expected=f"a checkpoint with {MANIFEST_NAME}, to make DCP metadata from",
            found=what_is_there(directory),
            remedy="A stock checkpoint has its own DCP metadata; other directories are not checkpoints.",
            key=str(directory),
        )
    return None if (directory / DCP_METADATA).exists() else read_manifest(directory)


def _write_view(directory: AnyPath, metadata: Manifest) -> list[AnyPath]:
    """Write the view, `.metadata` last; returns what was written.

    It is made aside first, so that the checkpoint never has half of one.

    Raises:
        DamagedCheckpointError: The index is damaged, or the manifest lists a view of other content.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = SafeSource(directory, manifest=metadata)
        write_dcp_view(Path(folder), source, source.metadata.values)
        made = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    listed = {entry.name: entry.checksum for entry in metadata.files}
    for name, data in made.items():
        if listed.get(name, checksum(data)) != checksum(data):
            raise DamagedCheckpointError(
                expected=f"{listed[name]}, which the manifest lists for {name}",
                found=f"{checksum(data)} for one made now",
                remedy=f"Nothing was written. Restore {name} from a copy, or let stock read a copy of the checkpoint "
                "whose view was never listed.",
                key=str(directory / name),
            )
    names = sorted(made, key=lambda name: name == DCP_METADATA)
    for name in names:
        replace_file(directory / name, made[name])
    return [directory / name for name in names]

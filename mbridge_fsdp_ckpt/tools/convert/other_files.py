# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Files beside tensors that a rewritten checkpoint keeps: run configuration, train state, tokenizer and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME, Files, is_part
from mbridge_fsdp_ckpt.integrations.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import copy_file, everything_in
from mbridge_fsdp_ckpt.io.store import AnyPath, store_of


@dataclass(frozen=True, slots=True)
class Beside:
    """What lies in a checkpoint, in whichever folder, and is neither payload nor metadata nor an index file.

    Args:
        files: Names of plain files, each with the name on disk.
        others: Names of links and special files, each with what it is.
    """

    files: dict[str, str]
    others: dict[str, str]


def beside_tensors(directory: AnyPath) -> Beside:
    """Look for the files of a checkpoint that belong to the run.

    In an object store those that the manifest lists: others are copies for stock, or of an older save.

    Raises:
        ManifestError: The manifest cannot be read.
        OSError: A folder may not be read.
    """
    if (directory / MANIFEST_NAME).exists() and (metadata := read_manifest(directory)).suffix:
        files = Files(metadata.save, metadata.suffix)
        return Beside({entry.name: files.added(entry.name) for entry in metadata.files}, {})
    found = Beside({}, {})
    for path in everything_in(directory):
        name, linked = path.relative_to(str(directory)).as_posix(), store_of(path).is_link()
        if linked or not (path.is_file() or path.is_dir()):
            found.others[name] = "a symbolic link" if linked else "a special file"
        elif path.is_file() and not is_part(name):
            found.files[name] = name
    return found


def other_files(directory: AnyPath) -> dict[str, str]:
    """See `Beside.files`, sorted by name.

    Raises:
        DamagedCheckpointError: There is a link or a special file; or one has a name that the format does not allow.
        ManifestError, OSError: See `beside_tensors`.
    """
    found = beside_tensors(directory)
    for name, kind in found.others.items():
        raise _refused(directory / name, kind)
    for name in found.files:
        try:
            ExtraEntry(name=name, size=0, checksum="")
        except ValueError as error:
            raise _refused(directory / name, "another name") from error
    return dict(sorted(found.files.items()))


def _refused(path: AnyPath, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        expected="plain files beside the tensors, to be carried over",
        found=found,
        remedy="Replace it by the file itself, or move it out of the checkpoint.",
        key=str(path),
    )


def carry_over(
    directory: AnyPath,
    names: Mapping[str, str],
    into: Path,
    listed: Mapping[str, ExtraEntry],
    edit: Callable[[bytes], bytes],
) -> None:
    """Copy files, block by block; those that the source lists are verified.

    Args:
        directory: The checkpoint they are in.
        names: Their names, and what they are called in that directory.
        into: Where they go.
        listed: Entries of those with a checksum.
        edit: Changes the run configuration.

    Raises:
        DamagedCheckpointError: A file is not what was written.
    """
    for name, stored in names.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(directory / stored, into / name, listed.get(stored), listed_in=MANIFEST_NAME)
    config = into / RUN_CONFIG
    if config.is_file():
        config.write_bytes(edit(config.read_bytes()))

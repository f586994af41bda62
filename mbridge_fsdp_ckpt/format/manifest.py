# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`manifest.json`, the metadata of a checkpoint: what a save says of itself, and the index files it names."""

from __future__ import annotations

import json

from pydantic import BaseModel, ValidationError

from mbridge_fsdp_ckpt.errors import NotACheckpointError, UnsupportedVersionError
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.format.schema import VERSION, Manifest
from mbridge_fsdp_ckpt.io.checksums import checksum
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import Json, is_plain_file, malformed, parse_json, read_bounded, what_is_there
from mbridge_fsdp_ckpt.io.store import AnyPath

MAX_MANIFEST_BYTES = 1 << 28


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content, with a checksum over the rest of it."""
    body = manifest.model_dump(mode="json", exclude={"checksum"})
    body["checksum"] = _body_checksum(body)
    return (json.dumps(body, indent=1) + "\n").encode()


def read_manifest(directory: AnyPath) -> Manifest:
    """Read and check the metadata.

    Raises:
        NotACheckpointError: There is none.
        UnsupportedVersionError: It was written by a newer major version.
        ManifestError: It contradicts the format, or was changed after it was written.
    """
    path = directory / MANIFEST_NAME
    if not is_plain_file(path):
        raise NotACheckpointError(
            expected=f"{MANIFEST_NAME} in a checkpoint directory",
            found=what_is_there(directory),
            remedy="Give the iteration directory (iter_0000010) of a complete checkpoint.",
            key=str(directory),
        )
    body = parse_json(path, read_bounded(path, MAX_MANIFEST_BYTES))
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        found = repr(body.get("format") if isinstance(body, dict) else body)[:100]
        raise malformed(path, f"a {FORMAT_NAME} manifest", f"format {found}")
    _check_version(path, body.get("version"))
    said = body.pop("checksum", None)
    if said != _body_checksum(body):
        raise malformed(path, "the content that its own checksum covers", "other content")
    return validated(Manifest, {**body, "checksum": said}, path)


def added_file(directory: AnyPath, name: str) -> AnyPath:
    """Where a file that the caller added to a checkpoint lies, whatever its format; it need not be there.

    In an object store each save has its own, beside copies under the fixed names that stock reads.

    Raises:
        UnsupportedVersionError, ManifestError: See `read_manifest`.
    """
    if not (directory / MANIFEST_NAME).exists():
        return directory / name
    metadata = read_manifest(directory)
    return directory / Files(metadata.save, metadata.suffix).added(name)


def listed_files(metadata: Manifest) -> tuple[ExtraEntry, ...]:
    """The entries of `Manifest.files` under the names that the files have in the directory."""
    files = Files(metadata.save, metadata.suffix)
    return tuple(entry.model_copy(update={"name": files.added(entry.name)}) for entry in metadata.files)


def validated[M: BaseModel](model: type[M], body: Json, path: AnyPath) -> M:
    """Data as the model has it.

    Raises:
        ManifestError: A field is missing or of another type.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:300]
        raise malformed(path, f"a valid {model.__name__}", f"{where}: {first['msg']}") from error


def _body_checksum(body: dict[str, Json]) -> str:
    return checksum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _check_version(path: AnyPath, version: Json) -> None:
    major = version[0] if isinstance(version, list) and version else None
    if type(major) is not int:
        raise malformed(path, "version [major, minor]", repr(version)[:100])
    if major > VERSION[0]:
        raise UnsupportedVersionError(
            expected=f"format version {VERSION[0]}.x",
            found=f"{version}"[:100],
            remedy="Read it with a newer release of mbridge_fsdp_ckpt.",
            key=str(path),
        )

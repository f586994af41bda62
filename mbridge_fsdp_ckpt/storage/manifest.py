"""`manifest.json`, the head of a checkpoint, and the chunk tables it names.

The head has every key once; each writing rank's chunks are a table of their own, so that no process holds all of
them.  A table is JSON lines: a header, then one chunk a line, `CHUNK_FIELDS` in order.  Everything read from disk is
checked here, before any payload is opened: types, bounds, names that stay inside the directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError, NotACheckpointError, UnsupportedVersionError
from mbridge_fsdp_ckpt.geometry import Box
from mbridge_fsdp_ckpt.storage.checksums import checksum
from mbridge_fsdp_ckpt.storage.values import dtype_from_name

FORMAT: Final = "fsdp_dtensor_safe"
VERSION = (1, 0)
MANIFEST_NAME = "manifest.json"
CHUNK_FIELDS = ("key", "file", "offset", "length", "box_offset", "box_size", "checksum", "frame_offset", "frame_length")
MAX_MANIFEST_BYTES = 1 << 28
_MAX_LINE_BYTES = 1 << 26
_MAX_INT = (1 << 63) - 1
_REMEDY = "The checkpoint is damaged or was edited: use another one."

Count = Annotated[int, Field(ge=0, le=_MAX_INT, strict=True)]


def _base_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError("a file name must be a base name inside the checkpoint directory")
    return name


def _dtype(name: str) -> str:
    dtype_from_name(name)
    return name


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # unknown fields belong to newer minor versions


class FileEntry(_Model):
    """A file with its size in bytes and checksum."""

    name: Annotated[str, AfterValidator(_base_name)]
    size: Count
    checksum: str


class KeyEntry(_Model):
    """One key: a tensor over all ranks."""

    dtype: Annotated[str, AfterValidator(_dtype)]
    shape: tuple[Count, ...]
    kind: Literal["sharded", "tensor", "int", "float", "bool"] = "sharded"
    family: str | None = None
    component: str = ""
    unpadded_rows: Count | None = None


class TableEntry(FileEntry):
    """A writing rank's chunk table."""

    rank: Count


class Manifest(_Model):
    """The head."""

    format: Literal["fsdp_dtensor_safe"]
    version: tuple[Count, Count]
    writer: dict[str, str]
    topology: dict[str, Count | str]
    sections: tuple[str, ...]
    keys: dict[str, KeyEntry]
    tables: tuple[TableEntry, ...]
    values: Any
    checksum: str = ""


class ParameterGroup(_Model):
    """Hyperparameters (`values.encode`d) with the optimizer's names of the parameters they are for."""

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any]


class TableHeader(_Model):
    """First line of a chunk table: what one rank wrote, and the values that are its own."""

    rank: Count
    coordinates: dict[str, Count]
    files: tuple[FileEntry, ...]
    keys: dict[str, KeyEntry]
    parameter_groups: tuple[ParameterGroup, ...] = ()
    stateless: tuple[str, ...] = ()
    values: Any = None
    extra_state: Any = None
    chunks: Count


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of one key in a file.

    Args:
        key: The key.
        file: Index into the header's files.
        offset: First byte of the raw elements, row-major, little-endian.
        length: Bytes of raw elements.
        box: Which block of the key.
        checksum: Of the raw elements.
        frame: (offset, length) of the enclosing `torch.save` record, which stock DCP reads.
    """

    key: str
    file: int
    offset: int
    length: int
    box: Box
    checksum: str
    frame: tuple[int, int]

    def to_row(self) -> list[Any]:
        """A line of the table."""
        box = list(self.box.offset), list(self.box.size)
        return [self.key, self.file, self.offset, self.length, *box, self.checksum, *self.frame]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the head with a checksum over the rest of it."""
    body = manifest.model_dump(mode="json", exclude={"checksum"})
    body["checksum"] = _body_checksum(body)
    path.write_text(json.dumps(body, indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read and check the head.

    Raises:
        NotACheckpointError: There is none.
        UnsupportedVersionError: It was written by a newer major version.
        ManifestError: It contradicts the format, or was changed after it was written.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file() or path.is_symlink():
        raise NotACheckpointError(
            expected=f"{MANIFEST_NAME} in a checkpoint directory",
            found=what_is_there(directory),
            remedy="Give the iteration directory (iter_0000010) of a complete checkpoint.",
            key=str(directory),
        )
    body = _parse_json(path, _read_bounded(path, MAX_MANIFEST_BYTES))
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _malformed(
            path, f"a {FORMAT} manifest", f"format {body.get('format') if isinstance(body, dict) else body!r}"
        )
    _check_version(path, body.get("version"))
    found = body.pop("checksum", None)
    if found != _body_checksum(body):
        raise _malformed(path, "the content that its own checksum covers", "other content")
    return _validated(Manifest, {**body, "checksum": found}, path)


def write_table(path: Path, header: TableHeader, chunks: list[Chunk]) -> None:
    """Write one rank's table."""
    with path.open("w") as file:
        file.write(json.dumps(header.model_dump(mode="json"), separators=(",", ":")) + "\n")
        for chunk in chunks:
            file.write(json.dumps(chunk.to_row(), separators=(",", ":")) + "\n")


def read_table_header(path: Path) -> TableHeader:
    """Read the first line of a table that has been verified, or is being written."""
    with path.open("rb") as file:
        return _validated(TableHeader, _parse_json(path, file.readline(_MAX_LINE_BYTES)), path)


def read_table(path: Path, keys: dict[str, KeyEntry]) -> Iterator[Chunk]:
    """The chunks of a table, each checked against its key and its file.

    Raises:
        ManifestError: A chunk lies outside its file or its key, has another length than its box, or an unknown key.
    """
    with path.open("rb") as file:
        header = _validated(TableHeader, _parse_json(path, file.readline(_MAX_LINE_BYTES)), path)
        count = 0
        while line := file.readline(_MAX_LINE_BYTES):
            chunk = _chunk(path, _parse_json(path, line))
            _check_chunk(path, chunk, header, keys)
            count += 1
            yield chunk
    if count != header.chunks:
        raise _malformed(path, f"{header.chunks} chunks", f"{count}")


def _chunk(path: Path, row: Any) -> Chunk:
    try:
        key, file, offset, length, box_offset, box_size, digest, frame_offset, frame_length = row
        numbers = (file, offset, length, frame_offset, frame_length, *box_offset, *box_size)
        if not all(type(n) is int and 0 <= n <= _MAX_INT for n in numbers):
            raise ValueError("numbers must be integers of 0 to 2**63 - 1")
        if not isinstance(key, str) or not isinstance(digest, str):
            raise TypeError("key and checksum must be strings")
        if not isinstance(box_offset, list) or not isinstance(box_size, list):
            raise TypeError("box offset and size must be lists")
        return Chunk(
            key, file, offset, length, Box(tuple(box_offset), tuple(box_size)), digest, (frame_offset, frame_length)
        )
    except (TypeError, ValueError) as error:
        raise _malformed(path, f"a chunk: {', '.join(CHUNK_FIELDS)}", f"{error}; {str(row)[:200]}") from error


def _check_chunk(path: Path, chunk: Chunk, header: TableHeader, keys: dict[str, KeyEntry]) -> None:
    entry = keys.get(chunk.key)
    if entry is None:
        raise _malformed(path, "chunks of keys that the manifest lists", f"key {chunk.key!r}")
    if not chunk.box.inside(entry.shape):
        raise _malformed(path, f"{chunk.key}: a box inside shape {entry.shape}", f"{chunk.box}")
    if chunk.length != chunk.box.volume * dtype_from_name(entry.dtype).itemsize:
        raise _malformed(path, f"{chunk.key}: {chunk.box.volume} elements of {entry.dtype}", f"{chunk.length} bytes")
    if chunk.file >= len(header.files):
        raise _malformed(path, f"one of {len(header.files)} files", f"file {chunk.file}")
    start, end = chunk.frame[0], sum(chunk.frame)
    if not (start <= chunk.offset and chunk.offset + chunk.length <= end <= header.files[chunk.file].size):
        raise _malformed(path, f"{chunk.key}: bytes inside {header.files[chunk.file]}", f"{chunk}")


def _body_checksum(body: dict[str, Any]) -> str:
    return checksum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _check_version(path: Path, version: Any) -> None:
    major = version[0] if isinstance(version, list) and version else None
    if type(major) is not int:
        raise _malformed(path, "version [major, minor]", repr(version)[:100])
    if major > VERSION[0]:
        raise UnsupportedVersionError(
            expected=f"format version {VERSION[0]}.x",
            found=f"{version}",
            remedy="Read it with a newer release of mbridge_fsdp_ckpt.",
            key=str(path),
        )


def _read_bounded(path: Path, limit: int) -> bytes:
    size = path.stat().st_size
    if size > limit:
        raise _malformed(path, f"at most {limit} bytes", f"{size}")
    return path.read_bytes()


def _parse_json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, "JSON", f"{type(error).__name__}: {error}"[:300]) from error


def _validated[M: _Model](model: type[M], body: Any, path: Path) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:300]
        raise _malformed(path, f"a valid {model.__name__}", f"{where}: {first['msg']}") from error


def _malformed(path: Path, expected: str, found: str) -> ManifestError:
    return ManifestError(expected=expected, found=found, remedy=_REMEDY, key=str(path))


def what_is_there(directory: Path) -> str:
    """The directory's first entries, for an error."""
    if not directory.exists():
        return "no such directory"
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else ["a file"]
    return "an empty directory" if not names else ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def check_file(directory: Path, entry: FileEntry) -> Path:
    """The path of a file that exists in the directory, as a plain file of its recorded size.

    Raises:
        DamagedCheckpointError: It is missing, a link, or of another size.
    """
    path = directory / entry.name
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpointError(
            expected=f"file {entry.name} of {entry.size} bytes",
            found="a symbolic link" if path.is_symlink() else "no such file",
            remedy="Use another checkpoint; its files must not be moved or linked.",
            key=str(path),
        )
    size = path.stat().st_size
    if size != entry.size:
        raise DamagedCheckpointError(
            expected=f"{entry.size} bytes",
            found=f"{size} bytes",
            remedy="The file was truncated or overwritten: use another checkpoint.",
            key=str(path),
        )
    return path

"""The data of `manifest.json` and of a chunk table's header, as pydantic checks it.

`docs/format.md` says what the fields mean; `docs/schema/` has the JSON schemas of these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mbridge_fsdp_ckpt.storage.values import dtype_from_name

VERSION = (1, 0)
MAX_INT = (1 << 63) - 1
MAX_NAME_BYTES, MAX_PATH_LENGTH = 255, 1024

Count = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]


def _base_name(name: str) -> str:
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise ValueError(f"a file name must not be longer than {MAX_NAME_BYTES} bytes")
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError("a file name must be a base name inside the checkpoint directory")
    return name


def _relative_name(name: str) -> str:
    if len(name) > MAX_PATH_LENGTH:
        raise ValueError(f"a path must not be longer than {MAX_PATH_LENGTH} characters")
    for part in name.split("/"):
        _base_name(part)
    return name


def _dtype(name: str) -> str:
    dtype_from_name(name)
    return name


_PART = r"(?!\.{1,2}(/|$))[^/\\\u0000]+"
BaseName = Annotated[
    str,
    AfterValidator(_base_name),
    Field(json_schema_extra={"pattern": f"^{_PART}$", "maxLength": MAX_NAME_BYTES}),
]
RelativeName = Annotated[
    str,
    AfterValidator(_relative_name),
    Field(json_schema_extra={"pattern": f"^{_PART}(/{_PART})*$", "maxLength": MAX_PATH_LENGTH}),
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # unknown fields belong to newer minor versions


class FileEntry(_Model):
    """A file with its size in bytes and checksum."""

    name: BaseName
    size: Count
    checksum: str


class ExtraEntry(FileEntry):
    """A file beside payload and tables; it may lie in a folder of the checkpoint."""

    name: RelativeName


class KeyEntry(_Model):
    """One key: a tensor over all ranks."""

    dtype: Annotated[str, AfterValidator(_dtype)]
    shape: tuple[Count, ...]
    kind: Literal["sharded", "tensor", "int", "float", "bool"] = "sharded"
    family: str | None = None
    component: str = ""
    unpadded_rows: Count | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether it lies in payload files; the number of another kind stands in a table."""
        return self.kind == "sharded"


class TableEntry(FileEntry):
    """A writing rank's chunk table."""

    rank: Count


def _one_a_rank(tables: tuple[TableEntry, ...]) -> tuple[TableEntry, ...]:
    if len({entry.rank for entry in tables}) < len(tables) or len({entry.name for entry in tables}) < len(tables):
        raise ValueError("each rank must have one table of its own")
    return tables


class Manifest(_Model):
    """The head."""

    format: Literal["fsdp_dtensor_safe"]  # FORMAT_NAME, which a type cannot name
    version: tuple[Count, Count]
    writer: dict[str, str]
    topology: dict[str, Count | str]
    sections: tuple[str, ...]
    keys: dict[str, KeyEntry]
    tables: Annotated[tuple[TableEntry, ...], AfterValidator(_one_a_rank)]
    files: tuple[ExtraEntry, ...] = ()
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

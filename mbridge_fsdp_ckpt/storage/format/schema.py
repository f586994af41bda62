"""The data of `manifest.json` and of a chunk table, its header and its rows, as pydantic checks it.

`docs/format.md` says what the fields mean; `docs/schema/` has the JSON schemas of these classes and types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from mbridge_fsdp_ckpt.plan.keys import Count, Entry, KeyEntry, Section
from mbridge_fsdp_ckpt.storage.entries import ExtraEntry, FileEntry

VERSION = (1, 0)
CHECKSUM_PATTERN = "^xxh3_64:[0-9a-f]{16}$"


class TableEntry(FileEntry):
    """A writing rank's chunk table."""

    rank: Count


def _one_a_rank(tables: tuple[TableEntry, ...]) -> tuple[TableEntry, ...]:
    if len({entry.rank for entry in tables}) < len(tables) or len({entry.name for entry in tables}) < len(tables):
        raise ValueError("each rank must have one table of its own")
    return tables


class Manifest(Entry):
    """The head."""

    format: Literal["fsdp_dtensor_safe"]  # FORMAT_NAME, which a type cannot name
    version: tuple[Count, Count]
    writer: dict[str, str]
    topology: dict[str, Count | str]
    sections: tuple[Section, ...]
    keys: dict[str, KeyEntry]
    tables: Annotated[tuple[TableEntry, ...], AfterValidator(_one_a_rank)]
    files: tuple[ExtraEntry, ...] = ()
    values: Any
    checksum: str = ""


class ParameterGroup(Entry):
    """Hyperparameters (`values.encode`d) with the optimizer's names of the parameters they are for."""

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any]


class TableHeader(Entry):
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


_RowKey = Annotated[str, Field(title="key", description="A key of the manifest.")]

ChunkRow = Annotated[
    tuple[
        _RowKey,
        Annotated[Count, Field(title="file", description="Index into the header's files.")],
        Annotated[Count, Field(title="elements_offset", description="First byte of the raw elements in that file.")],
        Annotated[
            Count,
            Field(title="elements_length", description="Bytes of them: the box's volume times the dtype's size."),
        ],
        Annotated[
            tuple[Count, ...], Field(title="box_offset", description="First element of the block, by dimension.")
        ],
        Annotated[tuple[Count, ...], Field(title="box_size", description="Elements of the block, by dimension.")],
        Annotated[
            str,
            Field(title="checksum", description="Of the enclosing record's bytes.", pattern=CHECKSUM_PATTERN),
        ],
        Annotated[Count, Field(title="record_offset", description="First byte of the enclosing record.")],
        Annotated[Count, Field(title="record_length", description="Bytes of the enclosing record.")],
    ],
    Field(title="Chunk row", description="One block of one key in a file."),
]

ScalarRow = Annotated[
    tuple[
        _RowKey,
        Annotated[
            str,
            Field(
                title="elements",
                description="The element's bytes, little-endian, in hexadecimal digits.",
                pattern="^([0-9a-f]{2})+$",
            ),
        ],
    ],
    Field(title="Number row", description="One number of a kind not sharded."),
]

ROW: TypeAdapter[ChunkRow | ScalarRow] = TypeAdapter(
    Annotated[
        ChunkRow | ScalarRow,
        Field(title="Row", description="Every line of a chunk table but the first.", union_mode="left_to_right"),
    ]
)
"""Of one line of a chunk table."""

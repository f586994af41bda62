"""JSON schemas of the files on disk, for readers in other languages.

`python -m tools.json_schema` writes them to docs/schema.  They are made from `storage.format.schema`, so that they say
what the package checks.  What JSON Schema cannot say is in docs/format.md: checksums, boxes inside shapes, bytes
inside files; and that a count is written without a point (to JSON Schema, 1.0 is an integer).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.storage.format.schema import CHECKSUM_PATTERN, ROW, VERSION, Manifest, TableHeader

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_DESCRIPTIONS = {
    "writer": "Versions of installed packages, by name.",
    "topology": "Sizes of the saving job.",
    "sections": '["model"], or ["model", "optimizer"].',
    "keys": "Every tensor, by key; in a table's header those whose first element its rank writes.",
    "tables": "The chunk tables, one a saving rank.",
    "values": "Typed value: non-tensor state.",
    "extra_state": "Typed value: FP8 scaling state of modules.",
    "files": "Other files, with their size and checksum; in a table's header its rank's payload files.",
    "size": "Bytes.",
    "dtype": "torch's name of a dtype.",
    "shape": "Global shape.",
    "kind": "sharded: shaped like its parameter. tensor: a 0-d tensor. int, float, bool: a Python number.",
    "family": "name/version of the family that split the parameter.",
    "unpadded_rows": "Rows of dimension 0 that are tokens; the rest pads the vocabulary.",
    "coordinates": "The writing rank's place.",
    "stateless": "Optimizer names that have elements here but no state.",
    "chunks": "Number of rows that follow.",
    "rank": "The writing rank.",
}


def schemas() -> dict[str, Schema]:
    """Each schema by file name."""
    return {
        "manifest.schema.json": _of_model(Manifest, "manifest.json, the head of a checkpoint."),
        "chunk_table_header.schema.json": _of_model(TableHeader, "First line of a chunk table."),
        "chunk_row.schema.json": {"$schema": DIALECT, **ROW.json_schema()},
    }


def _of_model(model: type[Manifest | TableHeader], description: str) -> Schema:
    body = model.model_json_schema(mode="validation")
    _complete(body)
    if model is Manifest:
        body["required"].append("checksum")
        body["properties"]["checksum"].pop("default")
        body["properties"]["version"]["prefixItems"][0] = {"const": VERSION[0], "title": "major"}
    return {"$schema": DIALECT, **body, "description": description}


def _complete(node: Any) -> None:
    """Say what pydantic leaves to the code: what checksums look like, and what fields mean."""
    if isinstance(node, dict):
        for name, field in node.get("properties", {}).items():
            if name == "checksum":
                field["pattern"] = CHECKSUM_PATTERN
            if name in _DESCRIPTIONS:
                field["description"] = _DESCRIPTIONS[name]
        for value in node.values():
            _complete(value)


def text(schema: Schema) -> str:
    """A schema's file."""
    return json.dumps(schema, indent=1) + "\n"


def write(folder: Path) -> None:
    """Write all schemas."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_text(text(schema))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schema"))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""JSON schemas of the files on disk, for readers in other languages.

`python -m tools.json_schema` writes them to docs/schema.  They are made from `format.schema`, so that they say
what the package checks.  What JSON Schema cannot say is in docs/format.md: checksums, boxes inside shapes, bytes
inside files; and that a count is written without a point (to JSON Schema, 1.0 is an integer).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.format.schema import VERSION, IndexHeader, Manifest, RankOwn

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

CHECKSUM_PATTERN = "^xxh3_64:[0-9a-f]{16}$"

_DESCRIPTIONS = {
    "writer": "Versions of installed packages, by name.",
    "topology": "Sizes of the saving job.",
    "sections": '["model"], or ["model", "optimizer"].',
    "save": "What tells this save from all others; its index files have it, too.",
    "suffix": "What the names of its payload and index files end with.",
    "families": "Families that split keys, name/version, each with the first of these keys.",
    "slots": "Names of the optimizer's slots.",
    "hyperparameters": "Each set once, as typed values, by its checksum.",
    "keys": "How many keys there are.",
    "states": "Modules with FP8 state, each counted by every rank that has some.",
    "index": "The index files, one a group of ranks.",
    "values": "Typed value: non-tensor state.",
    "extra_state": "Typed value: FP8 scaling state of modules.",
    "time": "When the head was made, just before the commit: UNIX time by rank 0's clock.",
    "begun": "When this rank's save began: UNIX time by its host's clock.",
    "phases": "Name, begin in seconds since then, and seconds of each phase that ended before this file was written.",
    "files": "Other files, with their size and checksum.",
    "size": "Bytes.",
    "dtype": "torch's name of a dtype.",
    "shape": "Global shape.",
    "kind": "sharded: shaped like its parameter. tensor: a 0-d tensor. int, float, bool: a Python number.",
    "family": "name/version of the family that split the parameter.",
    "unpadded_rows": "Rows of dimension 0 that are tokens; the rest pads the vocabulary.",
    "axes": "Names of coordinates.",
    "entries": "The different descriptions of keys.",
    "dimensions": "Of the boxes of rows.",
    "ranks": "How many ranks it is of.",
    "names": "How many names there are: of parameters, and of modules with FP8 state.",
    "numbers": "How many keys have one number.",
    "rows": "How many rows there are.",
    "texts": "Bytes of keys and names.",
    "record": "Bytes of the record.",
    "chunks": "How many rows and numbers there are.",
    "rank": "Who leads the group.",
}


def schemas() -> dict[str, Schema]:
    """Each schema by file name."""
    return {
        "manifest.schema.json": _of_model(Manifest, "manifest.json, the head of a checkpoint."),
        "index_header.schema.json": _of_model(IndexHeader, "The header of an index file."),
        "index_record.schema.json": _of_model(RankOwn, "The record of a rank's own index file."),
    }


def _of_model(model: type[Manifest | IndexHeader | RankOwn], description: str) -> Schema:
    body = model.model_json_schema(mode="validation")
    _complete(body)
    if model is Manifest:
        body["required"].append("checksum")
        body["properties"]["checksum"].pop("default")
        body["properties"]["hyperparameters"]["additionalProperties"] = False
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

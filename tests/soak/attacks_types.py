# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Every field of the manifest, and of an index file's header, with a value of every wrong type: found in the models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from mbridge_fsdp_ckpt.format.schema import IndexHeader, Manifest, RankOwn
from tests.soak import forge
from tests.soak.attacks_index import on, to
from tests.soak.attacks_json import Build
from tests.soak.attacks_safe import after, with_extra_files
from tests.soak.hostile import VERIFIED, Attack

Path = tuple[str | int, ...]
FIRST = "*"
"""In a path, the first key of an object."""

WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "1.5": 1.5,
    "whole float": 1.0,
    "1e308": 1e308,
    "negative": -1,
    "2**64": 1 << 64,
    "text": "x",
    "no text": "",
    "surrogate": "\ud800",
    "number": 7,
    "list": [],
    "list of lists": [[1]],
    "list of objects": [{}],
    "object": {},
    "object of null": {"x": None},
    "typed value": {"$tuple": []},
}

_KEY = {
    "family": "null, text, no text, surrogate",
    "component": "text, no text, surrogate",
    "unpadded_rows": "null, number",
    "kept_as": "null",
    "kept_by": "null, text, no text, surrogate",
}
_TIME = "null, 1.5, whole float, number"
_NAMED = "object, object of null"
_OWN = f"null, {_NAMED}"


def _all_but(right: str) -> str:
    return ", ".join(what for what in WRONG if what not in right.split(", "))


HARMLESS: dict[str, str] = {
    "manifest.writer": "object",
    "manifest.topology": "object",
    "manifest.suffix": "no text",
    "manifest.sections": "list",
    "manifest.families": "object",
    "manifest.slots": "list",
    "manifest.chunks": "number",
    "manifest.states": "number",
    "manifest.index.0.rank": "number",
    "manifest.files": "list",
    "manifest.values": _NAMED,
    "manifest.time": _TIME,
    "header.suffix": "no text",
    "header.axes": "list",
    **{f"header.entries.0.{field}": right for field, right in _KEY.items()},
    "record.values": _OWN,
    "record.extra_state": _OWN,
    "record.begun": _TIME,
    "record.phases": "list",
}
"""Field -> the values that are right for it, by docs/format.md, or that nothing goes by."""

UNSEEN: dict[str, str] = {
    "manifest.keys": "number",
    "manifest.index": "list",
    "manifest.index.0.checksum": "text, no text, surrogate",
    "record.values": _all_but(_OWN),
    "record.extra_state": _all_but(_OWN),
    "record.begun": _all_but(_TIME),
    "record.phases": _all_but("list"),
}
"""Field -> the values of its type that contradict other files; a load does not look at all of them.

Nor at the records of all ranks.
"""


def fields(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Paths of all fields of a model, and of the models inside it."""
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        for step, inner in _models_in(info.annotation):
            yield from fields(inner, (*prefix, name, *step))


def _models_in(annotation: Any) -> Iterator[tuple[Path, type[BaseModel]]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield (), annotation
    steps: dict[Any, Path] = {tuple: (0,), dict: (FIRST,)}
    step = steps.get(get_origin(annotation), ())
    for argument in get_args(annotation):
        for rest, model in _models_in(argument):
            yield (*step, *rest), model


def _put(body: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        body = body[next(iter(body))] if part == FIRST else body[part]
    body[path[-1]] = value


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    for title, model in (("manifest", Manifest), ("header", IndexHeader), ("record", RankOwn)):
        for path in fields(model):
            if path == ("checksum",):
                continue  # whoever heartbeats replaces it
            field = f"{title}.{'.'.join(map(str, path))}"
            for what, value in WRONG.items():
                reason = "of the field's type" if what in HARMLESS.get(field, "").split(", ") else ""
                reason = VERIFIED if what in UNSEEN.get(field, "").split(", ") else reason
                yield (
                    f"types: {what} as {field}",
                    Attack(f"types, {title}", partial(after, with_extra_files, _edit(title, path, value)), reason),
                )


def _edit(title: str, path: Path, value: Any) -> Build:
    """One field has another value; of an index file, that of a single rank."""
    if title == "manifest":
        return forge.edit_manifest(partial(_put, path=path, value=value))
    if title == "record":
        return on("alone", partial(_in_record, path, value))
    return partial(to, "alone", forge.edit_header(partial(_header, path, value), forge.OWN))


def _header(path: Path, value: Any, header: dict[str, Any]) -> bytes:
    _put(header, path, value)
    return json.dumps(header).encode()


def _in_record(path: Path, value: Any, file: forge.Index) -> None:
    record = json.loads(file["record"])
    _put(record, path, value)
    file["record"] = json.dumps(record).encode()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What is said of a file: its name inside the checkpoint, its size and its checksum."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from mbridge_fsdp_ckpt.plan.keys import Count, Entry

MAX_NAME_BYTES, MAX_PATH_LENGTH = 255, 1024


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


class FileEntry(Entry):
    """A file with its size in bytes and checksum."""

    name: BaseName
    size: Count
    checksum: str


class ExtraEntry(FileEntry):
    """A file beside payload and index files; it may lie in a folder of the checkpoint."""

    name: RelativeName

"""The end of writing a checkpoint: its head, stock's view of it, and the step that puts it in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.plan.keys import KeyEntry, Section
from mbridge_fsdp_ckpt.storage.commit.content import Commit, Content
from mbridge_fsdp_ckpt.storage.entries import ExtraEntry
from mbridge_fsdp_ckpt.storage.files import Json
from mbridge_fsdp_ckpt.storage.format.manifest import manifest_bytes
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.storage.format.schema import VERSION, Manifest, TableEntry
from mbridge_fsdp_ckpt.storage.stock.writer import write_dcp_view
from mbridge_fsdp_ckpt.storage.store import AnyPath


def head(
    *,
    writer: dict[str, str],
    topology: dict[str, int | str],
    sections: tuple[Section, ...],
    keys: Mapping[str, KeyEntry],
    tables: Iterable[TableEntry],
    values: Json,
) -> Manifest:
    """The head of a checkpoint of this version, but for the files that are put beside its tensors."""
    return Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        writer=writer,
        topology=topology,
        sections=sections,
        keys=dict(sorted(keys.items())),
        tables=tuple(tables),
        values=values,
    )


def finish(
    commit: Commit,
    manifest: Manifest,
    flushed: Iterable[str],
    *,
    view_of: Mapping[str, Any] | None,
    add_files: Callable[[Path], None] | None,
    progress: Callable[[], None] = lambda: None,
    last_call: Callable[[], None] = lambda: None,
) -> list[AnyPath]:
    """Commit what was written; returns what nobody needs any more, to be deleted.

    Args:
        commit: Where payload and tables lie.
        manifest: From `head`.
        flushed: Names of files that are on disk already.
        view_of: The values that stock's view is to have; None writes no view.
        add_files: See `Content`.
        progress: See `Content`.
        last_call: See `Content`.

    Raises:
        CheckpointError, OSError: Nothing was committed.
    """

    def with_files(files: tuple[ExtraEntry, ...]) -> bytes:
        return manifest_bytes(manifest.model_copy(update={"files": files}))

    def write_view(place: AnyPath) -> None:
        paths = [place / entry.name for entry in manifest.tables]
        write_dcp_view(place, manifest.keys, paths, view_of or {}, commit.suffix, progress)

    view = None if view_of is None else write_view
    return commit.finish(Content(with_files, frozenset(flushed), add_files, view, progress, last_call))

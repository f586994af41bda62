# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The end of writing a checkpoint: its metadata, DCP metadata of it, and the step that puts it in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.commit.content import Commit, Content
from mbridge_fsdp_ckpt.format.manifest import manifest_bytes
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, Files
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest
from mbridge_fsdp_ckpt.format.write_results import WriteResult, count_keys
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import Json
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import Section


def metadata(
    *,
    writer: dict[str, str],
    topology: dict[str, int | str],
    sections: tuple[Section, ...],
    files: Files,
    result: WriteResult,
    directory: AnyPath,
    values: Json,
    time: float | None = None,
) -> Manifest:
    """The metadata of a checkpoint of this version, but for the files that are put beside its tensors.

    Args:
        writer: Versions of what writes it.
        topology: Sizes of the saving job, by name, and how the model is sharded.
        sections: What was saved.
        files: The names of the save's files.
        result: What all ranks wrote.
        directory: Where the groups' index files lie, which are opened to count their keys.
        values: Non-tensor state that belongs to no rank, encoded.
        time: UNIX time of the save in seconds; None leaves it out.

    Raises:
        PlanDisagreementError: Of a key, not exactly one rank has written the first element.
        DamagedCheckpointError, ManifestError: A group's index file is not what its leader reported.
    """
    return Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        save=files.save,
        suffix=files.suffix,
        writer=writer,
        topology=topology,
        sections=sections,
        families=dict(sorted(result["families"].items())),
        slots=tuple(sorted(result["slots"])),
        hyperparameters=dict(sorted(result["hyperparameters"].items())),
        keys=count_keys(directory, files, result),
        chunks=result["chunks"],
        states=result["states"],
        index=tuple(IndexEntry.model_validate(entry) for entry in result["index"]),
        values=values,
        time=time,
    )


def finish(
    commit: Commit,
    manifest: Manifest,
    *,
    view_of: Mapping[str, Any] | None,
    add_files: Callable[[Path], None] | None,
    progress: Callable[[], None] = lambda: None,
    last_call: Callable[[], None] = lambda: None,
) -> list[AnyPath]:
    """Commit what was written; returns what nobody needs any more, to be deleted.

    Args:
        commit: Where payload and index lie.
        manifest: From `metadata`.
        view_of: The values that DCP metadata is to have; None writes none.
        add_files: Puts more files into an empty local directory; None where there are none.
        progress: Called after each step.
        last_call: Called just before the step that cannot be undone; raises where nobody waits for it any more.

    Raises:
        CheckpointError, OSError: Nothing was committed.
    """

    def with_files(files: tuple[ExtraEntry, ...]) -> bytes:
        return manifest_bytes(manifest.model_copy(update={"files": files}))

    def write_view(place: AnyPath) -> None:
        # Not at the top: torch.distributed.checkpoint costs each checkpoint process a second, and one needs it.
        from mbridge_fsdp_ckpt.dcp.writer import write_dcp_view

        write_dcp_view(place, SafeSource(place, manifest=manifest), view_of or {}, progress)

    view, files = None if view_of is None else write_view, Files(manifest.save, manifest.suffix)
    return commit.finish(Content(with_files, files.are_of_ranks, add_files, view, progress, last_call))

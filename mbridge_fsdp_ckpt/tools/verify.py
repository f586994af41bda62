# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Verifying a checkpoint: an audit of this format, what can be seen of others, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError, ManifestError
from mbridge_fsdp_ckpt.format.kinds import DESCRIPTIONS, DirectoryKind
from mbridge_fsdp_ckpt.format.names import DCP_METADATA, FORMAT_NAME, MANIFEST_NAME, STOCK_FORMAT
from mbridge_fsdp_ckpt.io.files import check_content, check_file
from mbridge_fsdp_ckpt.io.progress import Progress
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.opening import open_any
from mbridge_fsdp_ckpt.tools.audit import Audit
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import read_state
from mbridge_fsdp_ckpt.tools.findings import Finding, dcp_findings

_NOTE = "{} has no checksums: only structure and file sizes were checked"
STOCK_NOTE = _NOTE.format(f"stock {STOCK_FORMAT}")


@dataclass(slots=True)
class Report:
    """What was looked at, what is damaged, and what could not be looked at."""

    directory: str
    format: str
    damage: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _How:
    """Without payload, with so many threads, and what to tell on the way."""

    header: bool
    workers: int
    progress: Callable[[int], None]
    begin: Callable[[Audit], None]


def verify(directory: AnyPath, *, header: bool, workers: int, progress: Progress) -> Report:
    """Look at everything, and name all that is damaged.

    Args:
        directory: The checkpoint; nobody prunes it meanwhile.
        header: Whether payload is left unread.
        workers: Files that are read at a time.
        progress: Receives the progress.

    Raises:
        CheckpointError: It is none, or of a version that this release does not read.
    """
    report = Report(str(directory), FORMAT_NAME if (directory / MANIFEST_NAME).exists() else STOCK_FORMAT)
    with reading(directory) as alive:

        def advance(count: int) -> None:
            alive()
            progress.advance(count)

        def begin(audit: Audit) -> None:
            if progress.shown:
                progress.begin(directory.name, audit.total_bytes())

        report.damage.extend(_findings(directory, report, _How(header, workers, advance, begin)))
    return report


def _findings(directory: AnyPath, report: Report, how: _How) -> Iterator[Finding]:
    try:
        if report.format == FORMAT_NAME:
            yield from _audit(directory, report, how)
        else:
            yield from _stock(directory, report)
    except (ManifestError, DamagedCheckpointError) as error:  # the metadata itself
        name = MANIFEST_NAME if report.format == FORMAT_NAME else DCP_METADATA
        file = error.key.rpartition("/")[2] if error.key else name
        yield Finding("manifest", file, error.expected, error.found)
        report.notes.append("nothing else was checked: the metadata cannot be read")


def _audit(directory: AnyPath, report: Report, how: _How) -> Iterator[Finding]:
    audit = Audit(directory, content=not how.header, workers=how.workers, progress=how.progress)
    how.begin(audit)
    yield from audit.findings()
    yield from _copies(directory, audit, content=not how.header)
    report.checked = {"keys": len(audit.keys), **audit.checked}
    if how.header:
        report.notes.append("payload was not read (--header)")
    if audit.unread:
        report.notes.append(
            f"not checked: payload, keys and tiling that damaged index files describe ({', '.join(audit.unread)})"
        )
    listed = {file.name for file in audit.manifest.files}
    if (directory / DCP_METADATA).exists() and DCP_METADATA not in listed:
        report.notes.append(f"not checked: DCP metadata ({DCP_METADATA} and its values), which has no checksum here")


def _copies(directory: AnyPath, audit: Audit, *, content: bool) -> Iterator[Finding]:
    """In an object store stock reads copies of the files that the caller added: a load does not."""
    for entry in audit.manifest.files if audit.manifest.suffix else ():
        try:
            check_content(directory, entry) if content else check_file(directory, entry)
        except DamagedCheckpointError as error:
            yield Finding("file", entry.name, f"a copy for stock of what was saved, {error.expected}", error.found)


def _stock(directory: AnyPath, report: Report) -> Iterator[Finding]:
    """Of stock, and of other checkpoints of torch's: every tensor and every value has its place in a file."""
    source = open_any(directory)
    assert isinstance(source, DcpSource)
    report.format = source.metadata.format
    note = STOCK_NOTE if source.kind is DirectoryKind.STOCK else _NOTE.format(DESCRIPTIONS[source.kind])
    if source.kind is DirectoryKind.TORCH_DIST:
        note += "; non-tensor state has a CRC-32, which was compared"
    report.notes.append(note)
    report.checked = {"keys": len(source.tensors), "values": len(source.entries) - len(source.tensors)}
    if not source.entries:
        yield Finding("keys", DCP_METADATA, "tensors or values", "none: nothing was checked")
    found = list(dcp_findings(source))
    yield from found
    if source.kind is DirectoryKind.TORCH_DIST:
        yield from _common(source, {(one.file, one.expected, one.found) for one in found})


def _common(source: DcpSource, known: set[tuple[str, str, str]]) -> Iterator[Finding]:
    """Non-tensor state of `torch_dist`, which a load reads first, has checksums of its own."""
    try:
        read_state(source)
    except (ManifestError, DamagedCheckpointError) as error:
        file = (error.key or "").rpartition("/")[2]
        if (file, error.expected, error.found) not in known:  # its place was looked at as well
            yield Finding("file", file, error.expected, error.found)

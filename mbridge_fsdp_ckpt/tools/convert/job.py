# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What conversions on disk have in common: both ends opened, a commit, a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mbridge_fsdp_ckpt.commit import methods, removal
from mbridge_fsdp_ckpt.commit.content import Commit
from mbridge_fsdp_ckpt.commit.lease import of_save, renewing
from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.errors import ConfigurationError, describe_unexpected
from mbridge_fsdp_ckpt.format.kinds import DESCRIPTIONS, TORCH_DIST_COMMON, DirectoryKind
from mbridge_fsdp_ckpt.format.manifest import added_file
from mbridge_fsdp_ckpt.format.names import ARGUMENTS, TORCH_DIST_METADATA, Files
from mbridge_fsdp_ckpt.format.source import CheckpointSource, batches
from mbridge_fsdp_ckpt.integrations.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.integrations.bridge.run_config import RunConfig
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.files import what_is_there
from mbridge_fsdp_ckpt.io.progress import Progress
from mbridge_fsdp_ckpt.io.store import AnyPath, as_path, is_local
from mbridge_fsdp_ckpt.opening import REMEDIES, kind_of
from mbridge_fsdp_ckpt.remedies import remedy
from mbridge_fsdp_ckpt.settings import Settings
from mbridge_fsdp_ckpt.tools.convert.description import Description
from mbridge_fsdp_ckpt.tools.convert.destination import check_free, open_destination, publish, remove_empty
from mbridge_fsdp_ckpt.tools.convert.other_files import carry_over, other_files
from mbridge_fsdp_ckpt.tools.convert.rewrite import Chunks, Rewriting, Shares, rewrite
from mbridge_fsdp_ckpt.tools.convert.torch_dist.reader import TORCH_DIST

_REMEDIES_HERE = {
    DirectoryKind.SAFE: ("It needs no conversion; reshard and to-stock read it.",),
    DirectoryKind.STOCK: ("Use from-stock.",),
}


@dataclass(slots=True)
class Report:
    """What was read and written.

    Args:
        source: Directory that was read.
        read: Its format.
        destination: Directory that was written.
        written: Its format.
        keys: Tensors.
        bytes: Of their elements; where payload was copied as it is, of its files.
        files: Payload files that were written.
        tracker: Whether a tracker was written, too.
        resume: The settings with which a run resumes from the destination.
        notes: What did not come along, and what else to know.
    """

    source: str
    read: str
    destination: str
    written: str
    keys: int
    bytes: int = 0
    files: int = 0
    tracker: bool = False
    resume: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job[S: CheckpointSource]:
    """A checkpoint on its way from one directory to another.

    Args:
        directory: Where it is.
        source: The same, opened.
        target: Where it goes.
        report: What to say in the end.
        alive: Gives a heartbeat, so that nobody prunes the source.
        progress: Receives the progress.
    """

    directory: AnyPath
    source: S
    target: AnyPath
    report: Report
    alive: Callable[[], None]
    progress: Progress


AnyJob = Job[CheckpointSource]


@contextmanager
def job_of[S: CheckpointSource](
    source: str, destination: str, written: str, progress: Progress, opener: Callable[[AnyPath], S], read: str = ""
) -> Iterator[Job[S]]:
    """Open both ends; the source is kept from being pruned meanwhile.

    Args:
        source: The source as the user gave it.
        destination: The destination as the user gave it.
        written: The format to write.
        progress: Receives the progress.
        opener: Opens the source.
        read: The format to read, where it is torch_dist.
    """
    directory = find_checkpoint(as_path(source))
    if read == TORCH_DIST:
        _check_is_torch_dist(directory)
    with reading(directory) as alive:
        opened = opener(directory)
        metadata = opened.metadata
        target = open_destination(destination, directory, metadata.values.get("iteration"))
        report = Report(str(directory), metadata.format, str(target), written, len(metadata.keys))
        missing = [path for path in (target.parent, *target.parent.parents) if not path.exists()]
        try:
            yield Job(directory, opened, target, report, alive, progress)
        except BaseException as error:
            if is_local(target):
                remove_empty(missing)
            if isinstance(error, OSError):
                raise describe_unexpected(error, rank=None, doing=f"converting {directory} to {target}") from error
            raise


def _check_is_torch_dist(directory: AnyPath) -> None:
    """Check that a directory is a torch_dist checkpoint, because the code that opens one also accepts other formats.

    Raises:
        ConfigurationError: It is something else.
    """
    kind = kind_of(directory)
    if kind is not DirectoryKind.TORCH_DIST:
        raise ConfigurationError(
            expected=f"a checkpoint in the format {TORCH_DIST}",
            found=DESCRIPTIONS.get(kind) or what_is_there(directory),
            remedy=remedy(*_REMEDIES_HERE.get(kind, REMEDIES.get(kind, ()))),
            key=str(directory),
        )


def write_safe(
    job: AnyJob,
    description: Description,
    shares: Shares,
    writers: Sequence[int],
    chunks: Chunks | None = None,
) -> None:
    """Write the destination in this format, commit it, and let a new tracker name it."""
    job.report.notes += description.notes
    with committing(methods.begin(job.target)) as place:
        work = Rewriting(
            source=chunks or job.source,
            description=description,
            shares=shares,
            writers=writers,
            batches=list(batches(sorted(description.keys), job.source)),
            add_files=added_files(job),
            stock_view=partial(_wants_view, job),
            progress=counting(job, sum(entry.nbytes for entry in description.keys.values()), place),
            last_call=last_call(job),
        )
        job.report.files = rewrite(place, work)
    publish_to_tracker(job)


def _wants_view(job: AnyJob, chunks: int) -> bool:
    wanted = Settings().writes_dcp_metadata(chunks)
    if not wanted:
        job.report.notes.append(
            f"DCP metadata is left out, because there are {chunks} chunks: repair --stock-view adds it"
        )
    return wanted


@contextmanager
def committing(place: Commit) -> Iterator[Commit]:
    """A block that writes a checkpoint; if it raises, everything that was written is deleted."""
    try:
        yield place
    except BaseException:
        place.abort()
        removal.wait(None)  # nobody but the user waits
        raise


def counting(job: AnyJob, total: int, place: Commit) -> Callable[[int], None]:
    """Called with the bytes that were written: counts them, shows them, and renews the leases.

    That keeps the source from being pruned, and what is written here from being taken for a dead save's.
    """
    job.progress.begin(job.target.name, total)
    staging_alive = renewing(of_save(place.directory, Files("", place.suffix)))

    def count(size: int) -> None:
        job.alive()
        staging_alive()
        job.report.bytes += size
        job.progress.advance(size)

    return count


def last_call(job: AnyJob) -> Callable[[], None]:
    """The function to call right before the commit: it checks that the destination still does not exist."""
    return partial(check_free, job.target, job.directory) if is_local(job.target) else lambda: None


def added_files(job: AnyJob) -> Callable[[Path], None]:
    """What puts run files into a directory, the format's name in the run configuration changed."""
    directory = job.source.metadata.directory
    names = other_files(directory)
    if job.report.read == TORCH_DIST:  # Bridge takes a directory that has them for one in that format
        names = {n: stored for n, stored in names.items() if n not in (TORCH_DIST_METADATA, TORCH_DIST_COMMON)}
    listed = {entry.name: entry for entry in job.source.metadata.files}
    unlisted = [name for name, stored in names.items() if stored not in listed]
    if listed and unlisted:
        job.report.notes.append(f"carried over without a checksum to verify: {', '.join(unlisted[:5])}")
    if RUN_CONFIG in names and RunConfig.read(directory).ckpt_format is None:
        job.report.notes.append(f"{RUN_CONFIG} names no checkpoint.ckpt_format, and is carried over as it is")

    def edited(data: bytes) -> bytes:
        return RunConfig.of(data).with_format(job.report.written).encoded()

    return lambda into: carry_over(directory, names, into, listed, edited)


def publish_to_tracker(job: AnyJob) -> None:
    """Let the tracker name what was written, where there is none yet."""
    metadata = job.source.metadata
    without_bridge = not added_file(metadata.directory, RUN_CONFIG).exists()
    published = publish(job.target, of_megatron_lm=ARGUMENTS in metadata.values and without_bridge)
    job.report.tracker, job.report.resume = published.tracker, published.resume
    if published.note:
        job.report.notes.append(published.note)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Auditing a checkpoint: all that is wrong with it, where a load stops at the first.

    manifest -> each group's index: checksum, rows, whether it is what its ranks' own index files make
             -> each rank: its own index file; its payload, read once: its own checksum and those of its records
             -> each listed extra file
             -> over all: keys, and that chunks tile every key

Each thread holds one group's rows and one block of one file; of the tiling only sums are kept (`TilingFingerprint`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError
from mbridge_fsdp_ckpt.format.columns import box_of, chunks_of
from mbridge_fsdp_ckpt.format.directory import Directory
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.indexes import written_by
from mbridge_fsdp_ckpt.format.manifest import listed_files, read_manifest
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.schema import IndexEntry
from mbridge_fsdp_ckpt.format.sums import RecordHasher, hasher_of
from mbridge_fsdp_ckpt.format.values import decode_mapping_or_null
from mbridge_fsdp_ckpt.io.checksums import Hasher, as_text, checksum
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import blocks, check_file, hold, size_of
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.contradictions import contradictions, undecodable, unlike_copies
from mbridge_fsdp_ckpt.tools.findings import Finding, Subject, Tiling, of_unreadable

_NO_BYTES = checksum(b"")


@dataclass(slots=True)
class _Part:
    """What one task found and counted."""

    tiling: Tiling
    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    unread: str = ""


class Audit:
    """An audit of a checkpoint of this format.

    Args:
        directory: The iteration directory.
        content: Whether payload and extra files are read; else their sizes are checked.
        workers: Threads.
        progress: Gets the number of bytes read since its last call, from any thread.

    Raises:
        NotACheckpointError, UnsupportedVersionError, ManifestError: The metadata cannot be read.
        StoreClientError: The store does not answer; while findings are asked for, too.
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        content: bool = True,
        workers: int = 4,
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._directory = directory = hold(directory)
        self._content, self._workers, self._progress = content, workers, progress
        self._stopped = Event()
        self.manifest = read_manifest(directory)
        self._files = Files(self.manifest.save, self.manifest.suffix)
        self.keys: Mapping[str, KeyEntry] = {}
        self.checked: Counter[str] = Counter()
        self.unread: list[str] = []

    def total_bytes(self) -> int:
        """Bytes that `findings` is going to read, as far as the index can be read."""
        total = sum(entry.size for entry in self.manifest.index)
        if self._content:
            total += sum(file.size for file in self.manifest.files)
            total += sum(int(group.ranks["size"].sum()) for group, _ in self._groups())
        return total

    def findings(self) -> Iterator[Finding]:
        """All that is wrong, file by file; afterwards `checked` and `unread` say what was looked at."""
        for expected, found in undecodable(self.manifest):
            yield Finding("manifest", MANIFEST_NAME, expected, found)
        damaged: list[Finding] = []
        groups = list(self._groups(damaged.append))
        yield from damaged
        self.unread += [finding.file for finding in damaged]
        index = Directory([group for group, _ in groups])
        try:
            self.keys = index.entries()
        except CheckpointError as error:
            yield Finding("index", _name(error.key), error.expected, error.found)
            self.unread.append(_name(error.key))
            return
        tiling = Tiling(self.keys)
        tasks = [partial(self._extra, entry) for entry in listed_files(self.manifest)]
        tasks += [partial(self._group, group, entry) for group, entry in groups]
        tasks += [partial(self._rank, index, group, place) for group, _ in groups for place in range(len(group.ranks))]
        for part in self._in_order(tasks):
            yield from part.findings
            self.unread += [part.unread] if part.unread else []
            tiling.merge(part.tiling)
            self.checked.update(part.checked)
        if not self.unread:
            yield from self._key_findings(index)
            yield from tiling.findings()

    def _groups(self, tell: Callable[[Finding], None] = lambda finding: None) -> Iterator[tuple[IndexFile, IndexEntry]]:
        """The groups' index files that can be opened; `tell` gets what is wrong with the others."""
        for entry in self.manifest.index:
            try:
                path = check_file(self._directory, entry)
                yield IndexFile(path, entry.size, self._files, OpenFiles()), entry
            except CheckpointError as error:
                tell(Finding("index", entry.name, error.expected, error.found))
            except OSError as error:
                tell(of_unreadable("index", entry.name, error))

    def _in_order(self, tasks: Iterable[Callable[[], _Part]]) -> Iterator[_Part]:
        pending: deque[Future[_Part]] = deque()
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                for task in tasks:
                    pending.append(pool.submit(task))
                    if len(pending) >= 2 * self._workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                self._stopped.set()  # ends what still runs where the caller gave up
                for future in pending:
                    future.cancel()

    def _extra(self, entry: FileEntry) -> _Part:
        part = _Part(Tiling({}))
        self._file(entry, [], part, "file")
        return part

    def _group(self, group: IndexFile, entry: IndexEntry) -> _Part:
        """A group's index: what was written, and what its ranks' own make."""
        part = _Part(Tiling(self.keys), unread=entry.name)
        if not self._file(entry, [], part, "index", read=True):
            return part
        try:
            for place, rows in group.sharded_rows():
                key, dimensions = group.text_of_key(place), len(group.entry(place).shape)
                for row in rows:
                    part.tiling.add(key, box_of(row, dimensions))
            for place, _, _ in group.all_numbers():
                part.tiling.add(group.text_of_key(place), Box((), ()))
        except CheckpointError as error:
            part.findings.append(Finding("index", entry.name, error.expected, error.found))
            return part
        part.unread = ""
        part.checked["chunks"] += group.header.rows + group.header.numbers
        unlike = contradictions(group, self.manifest, self._own)
        part.findings += [Finding("index", entry.name, expected, found) for expected, found in unlike]
        return part

    def _own(self, rank: int) -> IndexFile:
        return written_by(rank, self._directory, self._files, OpenFiles())

    def _rank(self, index: Directory, group: IndexFile, place: int) -> _Part:
        """What a rank wrote: its own index file, and its payload by the group's index."""
        part = _Part(Tiling({}))
        rank, size, digest = (int(number) for number in group.ranks[place])
        name = self._files.of_rank(rank)
        part.checked["indexes"] += name != group.path.name
        chunks: list[Chunk] = []
        try:
            own = self._own(rank)
            record = own.record()
            for values in (record.values, record.extra_state):
                decode_mapping_or_null(values)
            chunks = _chunks(own)
            if own.ranks.tolist() != [group.ranks[place].tolist()]:
                part.findings.append(Finding("index", name, f"that of rank {rank}", "another"))
            part.findings += [Finding("index", name, *unlike) for unlike in unlike_copies(own, index)]
        except CheckpointError as error:
            part.findings.append(Finding("index", name, error.expected, error.found))
        except OSError as error:
            part.findings.append(of_unreadable("index", name, error))
        if size:
            entry = FileEntry(name=self._files.payload(rank), size=size, checksum=as_text(digest))
            self._file(entry, chunks or self._chunks_of(group, place), part, "file")
        return part

    def _chunks_of(self, group: IndexFile, rank: int) -> list[Chunk]:
        """A rank's chunks by its group's index, as far as that can be read."""
        try:
            return _chunks(group, rank)
        except CheckpointError:
            return []  # a finding of the group

    def _file(
        self, entry: FileEntry, chunks: Sequence[Chunk], part: _Part, subject: Subject, *, read: bool = False
    ) -> bool:
        """Check a file and the records in it; True where the file as a whole is what was written."""
        part.checked["indexes" if subject == "index" else f"{subject}s"] += 1
        before = len(part.findings)
        size = self._size(entry, part, subject)
        present = [chunk for chunk in chunks if size is not None and chunk.record.end <= size]
        lost = "no such bytes" if size is None else f"a file that ends at byte {size}"
        part.findings += [_of_chunk(entry.name, c, lost) for c in chunks if size is None or c.record.end > size]
        if size is None or not (self._content or read):
            return len(part.findings) == before
        try:
            digest, records = self._digests(self._directory / entry.name, present)
        except OSError as error:
            part.findings.append(of_unreadable(subject, entry.name, error))
            return False
        part.checked["bytes"] += size
        if size == entry.size and digest != entry.checksum:
            part.findings.append(Finding(subject, entry.name, entry.checksum, digest))
        for chunk, record in zip(present, records, strict=True):
            if record != as_text(chunk.checksum):
                part.findings.append(_of_chunk(entry.name, chunk, record))
        return len(part.findings) == before

    def _size(self, entry: FileEntry, part: _Part, subject: Subject) -> int | None:
        """The file's size; None where there is nothing that may be read."""
        try:
            check_file(self._directory, entry)
        except DamagedCheckpointError as error:
            part.findings.append(Finding(subject, entry.name, error.expected, error.found))
        else:
            return entry.size
        path = self._directory / entry.name
        actual = entry.model_copy(update={"size": size_of(path) if path.is_file() else 0})
        try:
            check_file(self._directory, actual)
        except DamagedCheckpointError:
            return None
        return actual.size

    def _digests(self, path: AnyPath, chunks: Sequence[Chunk]) -> tuple[str, list[str]]:
        """Checksums of a file and of the records of chunks in it, in one pass."""
        spans = [chunk.record for chunk in chunks]
        total, found = Hasher(), [_NO_BYTES] * len(spans)
        waiting = deque(sorted(range(len(spans)), key=lambda index: spans[index]))
        running: dict[int, Hasher | RecordHasher] = {}
        position = 0
        for block in blocks(path):
            view, end = memoryview(block), position + len(block)
            total.update(view)
            while waiting and spans[waiting[0]].offset < end:
                index = waiting.popleft()
                running[index] = hasher_of(chunks[index].lead, chunks[index].size, spans[index].length)
            for index in list(running):
                first, last = spans[index].offset, spans[index].end
                running[index].update(view[max(0, first - position) : last - position])
                if last <= end:
                    found[index] = running.pop(index).result()
            position = end
            self._advance(len(block))
        return total.result(), found

    def _advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise CancelledError
        self._progress(count)

    def _key_findings(self, index: Directory) -> Iterator[Finding]:
        if len(self.keys) != self.manifest.keys:
            yield Finding("keys", MANIFEST_NAME, f"{self.manifest.keys} keys", f"{len(self.keys)}")
        for key, writers in index.without_one_origin():
            yield Finding("keys", MANIFEST_NAME, "one rank to have written its first element", f"{writers}", key)


def _chunks(file: IndexFile, rank: int = 0) -> list[Chunk]:
    found: list[Chunk] = []
    for place, rows in file.sharded_rows():
        key, entry = file.text_of_key(place), file.entry(place)
        found += [chunk for _, chunk in chunks_of(key, rows[rows["rank"] == rank], entry)]
    return found


def _name(key: str | None) -> str:
    return (key or MANIFEST_NAME).rpartition("/")[2]


def _of_chunk(file: str, chunk: Chunk, found: str) -> Finding:
    span = chunk.record.offset, chunk.record.end
    return Finding("chunk", file, as_text(chunk.checksum), found, chunk.key, chunk.box, span)

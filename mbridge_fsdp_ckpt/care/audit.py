"""Auditing a checkpoint: all that is wrong with it, where a load stops at the first.

    manifest -> each table: checksum, rows -> each payload file, read once: its own checksum and those of its records
             -> each listed extra file     -> over all tables: keys, and that chunks tile every key

Each thread holds one table's rows and one block of one file; of the tiling only sums are kept (`TilingSketch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from mbridge_fsdp_ckpt.care.findings import Finding, Subject, Tiling
from mbridge_fsdp_ckpt.errors import CheckpointError, DamagedCheckpointError
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.checksums import Hasher, checksum
from mbridge_fsdp_ckpt.storage.entries import FileEntry
from mbridge_fsdp_ckpt.storage.files import blocks, check_file, hold, size_of
from mbridge_fsdp_ckpt.storage.format.manifest import read_manifest
from mbridge_fsdp_ckpt.storage.format.names import MANIFEST_NAME
from mbridge_fsdp_ckpt.storage.format.schema import TableEntry
from mbridge_fsdp_ckpt.storage.format.table import Chunk, read_table, read_table_header
from mbridge_fsdp_ckpt.storage.store import AnyPath

_NO_BYTES = checksum(b"")


@dataclass(slots=True)
class _Part:
    """What one task found and counted."""

    tiling: Tiling
    findings: list[Finding] = field(default_factory=list)
    keys: Mapping[str, KeyEntry] = field(default_factory=dict)
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
        NotACheckpointError, UnsupportedVersionError, ManifestError: The head cannot be read.
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
        self.checked: Counter[str] = Counter()
        self.unread: list[str] = []

    def total_bytes(self) -> int:
        """Bytes that `findings` is going to read, as far as the tables' heads can be read."""
        total = sum(table.size for table in self.manifest.tables)
        if not self._content:
            return total
        total += sum(file.size for file in self.manifest.files)
        for table in self.manifest.tables:
            try:
                header = read_table_header(check_file(self._directory, table))
            except (CheckpointError, OSError):
                continue  # a finding, later
            total += sum(file.size for file in header.files)
        return total

    def findings(self) -> Iterator[Finding]:
        """All that is wrong, file by file; afterwards `checked` and `unread` say what was looked at."""
        tiling = Tiling(self.manifest.keys)
        declared: Counter[str] = Counter()
        others: dict[str, KeyEntry] = {}
        tasks = [partial(self._extra, entry) for entry in self.manifest.files]
        tables = [partial(self._table, entry) for entry in self.manifest.tables]
        for part in self._in_order([*tasks, *tables]):
            yield from part.findings
            self.unread += [part.unread] if part.unread else []
            tiling.merge(part.tiling)
            self.checked.update(part.checked)
            for key, entry in part.keys.items():
                declared[key] += 1
                if self.manifest.keys.get(key) != entry:
                    others[key] = entry
        if not self.unread:
            yield from self._key_findings(declared, others)
            yield from tiling.findings()

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
        part = _Part(Tiling(self.manifest.keys))
        self._file(entry, [], part, "file")
        return part

    def _table(self, entry: TableEntry) -> _Part:
        part = _Part(Tiling(self.manifest.keys), unread=entry.name)
        rows: dict[int, list[Chunk]] = defaultdict(list)
        if not self._file(entry, [], part, "table", read=True):
            return part
        path = self._directory / entry.name
        try:
            header = read_table_header(path)
            for chunk in read_table(path, self.manifest.keys):
                part.tiling.add(chunk.key, chunk.box)
                if isinstance(chunk, Chunk):
                    rows[chunk.file].append(chunk)
        except CheckpointError as error:
            part.findings.append(Finding("table", entry.name, error.expected, error.found))
            return part
        if header.rank != entry.rank:
            part.findings.append(Finding("table", entry.name, f"rank {entry.rank}", f"rank {header.rank}"))
        part.unread, part.keys = "", header.keys
        for index, file in enumerate(header.files):
            self._file(file, rows[index], part, "file")
        part.checked["chunks"] += header.chunks
        return part

    def _file(
        self, entry: FileEntry, chunks: Sequence[Chunk], part: _Part, subject: Subject, *, read: bool = False
    ) -> bool:
        """Check a file and the records in it; True where the file as a whole is what was written."""
        part.checked[f"{subject}s"] += 1
        before = len(part.findings)
        size = self._size(entry, part, subject)
        present = [chunk for chunk in chunks if size is not None and chunk.record.end <= size]
        lost = "no such bytes" if size is None else f"a file that ends at byte {size}"
        part.findings += [_of_chunk(entry.name, c, lost) for c in chunks if size is None or c.record.end > size]
        if size is None or not (self._content or read):
            return len(part.findings) == before
        try:
            digest, records = self._digests(self._directory / entry.name, [chunk.record for chunk in present])
        except OSError as error:
            part.findings.append(Finding(subject, entry.name, "a file that can be read", str(error)))
            return False
        part.checked["bytes"] += size
        if size == entry.size and digest != entry.checksum:
            part.findings.append(Finding(subject, entry.name, entry.checksum, digest))
        for chunk, record in zip(present, records, strict=True):
            if record != chunk.checksum:
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

    def _digests(self, path: AnyPath, spans: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
        """Checksums of a file and of spans (first byte, length) in it, in one pass."""
        total, found = Hasher(), [_NO_BYTES] * len(spans)
        waiting = deque(sorted(range(len(spans)), key=lambda index: spans[index]))
        running: dict[int, Hasher] = {}
        position = 0
        for block in blocks(path):
            view, end = memoryview(block), position + len(block)
            total.update(view)
            while waiting and spans[waiting[0]][0] < end:
                running[waiting.popleft()] = Hasher()
            for index in list(running):
                first, last = spans[index][0], sum(spans[index])
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

    def _key_findings(self, declared: Mapping[str, int], others: Mapping[str, KeyEntry]) -> Iterator[Finding]:
        keys = self.manifest.keys
        for key in sorted(keys.keys() | declared.keys()):
            said = declared.get(key, 0)
            if said != 1:
                yield Finding("keys", MANIFEST_NAME, "one table to declare it", f"{said}", key)
            if key in others:
                listed = str(keys[key]) if key in keys else "a key that the manifest lists"
                yield Finding("keys", MANIFEST_NAME, listed, str(others[key]), key)


def _of_chunk(file: str, chunk: Chunk, found: str) -> Finding:
    span = chunk.record.offset, chunk.record.end
    return Finding("chunk", file, chunk.checksum, found, chunk.key, chunk.box, span)

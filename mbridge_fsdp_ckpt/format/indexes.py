# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The index files of a checkpoint: those of groups, and those that ranks wrote, each opened when it is first asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from mbridge_fsdp_ckpt.format.directory import Directory
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME, Files
from mbridge_fsdp_ckpt.format.schema import Manifest
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.files import check_file, malformed, size_of
from mbridge_fsdp_ckpt.io.ranges import OpenFiles
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.plan.keys import KeyEntry


class Indexes:
    """Finds keys and names; it does not know its reader, whose files would stay open in a reference cycle.

    Args:
        directory: The checkpoint, held.
        manifest: The manifest of the checkpoint.
        near: In a load, ranks whose index files are looked at first.
        opened: Reads files.
    """

    def __init__(self, directory: AnyPath, manifest: Manifest, near: Sequence[int], opened: OpenFiles) -> None:
        self._directory, self._manifest, self._opened = directory, manifest, opened
        self.near_ranks = [*near]
        self._files = Files(manifest.save, manifest.suffix)
        self._near_files: dict[int, IndexFile | None] = {}

    @cached_property
    def all(self) -> Directory:
        """The directories of all groups' index files."""
        return Directory(list(self.share(0, 1)))

    def share(self, index: int, count: int) -> Iterator[IndexFile]:
        """One of `count` shares of the groups' index files."""
        if "all" in vars(self):  # opened already
            yield from self.all.groups[index::count]
            return
        for entry in self._manifest.index[index::count]:
            path = check_file(self._directory, entry, MANIFEST_NAME)
            yield IndexFile(path, entry.size, self._files, self._opened)

    def of_rank(self, rank: int) -> IndexFile:
        """The index file that a rank wrote.

        Raises:
            DamagedCheckpointError: It is not there.
            ManifestError: It contradicts the format, or is of another rank or save.
        """
        found = written_by(rank, self._directory, self._files, self._opened)
        if found.ranks["rank"].tolist() != [rank]:
            raise malformed(found.path, f"the index file of rank {rank}", f"that of {found.ranks['rank'].tolist()[:8]}")
        return found

    def near(self) -> Iterator[IndexFile]:
        """What ranks wrote that probably have what is asked for; each is opened when it is first looked at."""
        world = self._manifest.topology.get("world")
        for rank in self.near_ranks:
            if not isinstance(world, int) or rank >= world:
                continue
            if rank not in self._near_files:
                there = (self._directory / self._files.of_rank(rank)).exists()
                self._near_files[rank] = self.of_rank(rank) if there else None
            file = self._near_files[rank]
            if file is not None:
                yield file

    def entry(self, key: str) -> KeyEntry | None:
        """A key's description, if it is one of the checkpoint's."""
        near = next(filter(None, (file.described(key) for file in self.near())), None)
        if near is not None:
            return near
        found = self.all.places(key)
        return found[0][0].entry(found[0][1]) if found else None

    def entries(self) -> dict[str, KeyEntry]:
        """All keys, sorted.

        Raises:
            ManifestError: There are not as many as the prefix says.
        """
        found = self.all.entries()
        if len(found) != self._manifest.keys:
            path = self._directory / MANIFEST_NAME
            raise malformed(path, f"as many keys as the index has, {len(found)}", f"{self._manifest.keys}")
        return found

    def names(self, kind: int, name: str) -> Iterator[tuple[IndexFile, int]]:
        """The index files that have a name of a kind, each with its places there."""
        for file in self.near():
            if found := file.find_names(kind, name):
                yield from ((file, place) for place in found)
                return
        yield from self.all.names(kind, name)


def written_by(rank: int, directory: AnyPath, files: Files, opened: OpenFiles) -> IndexFile:
    """The index file of a rank's name, whichever rank it says it is of.

    Raises:
        DamagedCheckpointError: It is not there.
        ManifestError: It contradicts the format, or is of another save.
    """
    path = directory / files.of_rank(rank)
    size = size_of(path) if path.is_file() else 0
    check_file(directory, FileEntry(name=path.name, size=size, checksum=""))
    return IndexFile(path, size, files, opened)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Commit without a rename, for object stores: the manifest is the marker, and it is written last.

    save to s3://bucket/run/iter_0000010
        __0_0-<token>.distcp, rank_00000-<token>.index, ...    beside those of an older save, if there is one
        __added-<token>/run_config.yaml, ...                     files that the caller adds
        manifest.json                                            one object: from here on the new ones count
        .metadata                                                DCP metadata, where it is wanted
        run_config.yaml, ...                                     copies of the added files, where stock looks for them
        the older save's objects are deleted, once nobody waits for it

An object appears whole or not at all, so a save that overwrites is atomic, too.  A directory without a manifest is not
a checkpoint.  Nothing of an older checkpoint changes before the manifest is there.  Until all ranks have written, rank
0 renews `__saving-<token>`: one rank's objects may be an hour old before the last one's are there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.commit.added import added_by, check_not_elsewhere
from mbridge_fsdp_ckpt.commit.content import Content
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.manifest import read_manifest
from mbridge_fsdp_ckpt.format.metadata import has_metadata
from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    MANIFEST_NAME,
    Files,
    is_head,
    is_part,
    suffix_of,
    token,
)
from mbridge_fsdp_ckpt.io.entries import ExtraEntry
from mbridge_fsdp_ckpt.io.files import everything_in, file_checksum, replace_file, size_of
from mbridge_fsdp_ckpt.io.store import AnyPath, is_local, store_of

_log = logging.getLogger(__name__)


class MarkerCommit:
    """See `content.Commit`."""

    def __init__(self, target: AnyPath) -> None:
        self.directory = target
        self.suffix = f"-{token()}"
        self._files = Files("", self.suffix)
        self._committed = False
        target.mkdir(parents=True, exist_ok=True)

    def finish(self, content: Content) -> list[AnyPath]:
        """See `content.Commit`."""
        folder = Path(mkdtemp())
        try:
            added = self._add(content.add_files, folder, content.progress) if content.add_files is not None else ()
            copies = _copies(self.directory)
            content.last_call()
            replace_file(self.directory / MANIFEST_NAME, content.manifest(added))
            self._committed = True
            return self._tidied(content, folder, [entry.name for entry in added], copies)
        finally:
            removal.delete(folder)

    def _tidied(self, content: Content, folder: Path, added: list[str], copies: list[str]) -> list[AnyPath]:
        """After the commit: what stock reads is that of the new save, too; returns what nobody needs any more."""
        try:
            for name in added:
                self._upload(folder / name, self.directory / name)
                content.progress()
            for name in sorted({*copies} - {*added}):
                store_of(self.directory / name).remove()
            self._renew_view(content)
            lease = self.directory / self._files.lease  # rank 0 may renew it until all ranks know of the commit
            return [lease, *_objects(self.directory, without=self.suffix)]
        except OSError as error:  # the checkpoint is there: no failure of the save
            _log.warning("DCP metadata or older objects in %s were left as they are: %s", self.directory, error)
            return []

    def _add(
        self, add_files: Callable[[Path], None], folder: Path, progress: Callable[[], None]
    ) -> tuple[ExtraEntry, ...]:
        """Have files added to a folder and upload them under names of this save's own."""
        names, entries = added_by(add_files, folder), []
        check_not_elsewhere(self.directory, names)
        for name in names:
            path = folder / name
            entries.append(ExtraEntry(name=name, size=size_of(path), checksum=file_checksum(path, progress)))
            self._upload(path, self.directory / self._files.added(name))
            progress()
        return tuple(entries)

    def _renew_view(self, content: Content) -> None:
        content.progress()
        if content.write_view is not None:
            content.write_view(self.directory)
        elif (self.directory / DCP_METADATA).exists():
            store_of(self.directory / DCP_METADATA).remove()
        content.progress()

    def _upload(self, path: Path, target: AnyPath) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)

    def abort(self) -> None:
        """See `content.Commit`."""
        if not self._committed:
            removal.delete_later(self._own())

    def _own(self) -> list[AnyPath]:
        return [path for path in _objects(self.directory) if suffix_of(_name(self.directory, path)) == self.suffix]


def _copies(directory: AnyPath) -> list[str]:
    """The fixed names of what the save before added; none where its metadata does not say."""
    try:
        return [entry.name for entry in read_manifest(directory).files]
    except CheckpointError:
        return []


def _objects(directory: AnyPath, without: str = "") -> list[AnyPath]:
    """What has a name of one save's own; in a file system a folder of such files is one."""
    found: list[AnyPath] = list(directory.iterdir() if is_local(directory) else everything_in(directory))
    found = [path for path in found if suffix_of(_name(directory, path)) not in ("", without)]
    return sorted(found, key=lambda path: _name(directory, path))


def _name(directory: AnyPath, path: AnyPath) -> str:
    return path.relative_to(str(directory)).as_posix()


def leftovers(root: AnyPath) -> list[AnyPath]:
    """Objects below a root of saves that died before their manifest was there; not where one may not look."""
    if not root.exists():
        return []
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    folders = [path for path in folders if not store_of(path).is_link()]
    found: list[AnyPath] = []
    for directory in sorted(folders, key=lambda path: path.name):
        try:
            found += dead_objects(directory)
        except PermissionError as error:
            _log.info("not searched for leftovers: %s", error)
    return found


def dead_objects(directory: AnyPath) -> list[AnyPath]:
    """Objects in a directory that never got a manifest."""
    return [] if not directory.is_dir() or (directory / MANIFEST_NAME).exists() else _objects(directory)


def of_another(directory: AnyPath) -> list[AnyPath]:
    """Objects in a directory of another save than the one that its manifest is of."""
    return _objects(directory, without=_suffix_in(directory) or "") if directory.is_dir() else []


def condemned(target: AnyPath) -> list[AnyPath]:
    """Of the objects that dead saves of a target left, those that its next save may delete at once.

    The last one stays until that save commits, and so tells that other files there, which have no name of their own in
    each save, are nobody's: otherwise `target.check_replaceable` would refuse the target if that save died as well.
    Where stock has metadata, all stay until then: without its manifest our view reads them.
    """
    return [] if has_metadata(target) else dead_objects(target)[:-1]


def remove(directory: AnyPath, may_go: Callable[[AnyPath], bool]) -> bool:
    """Delete a checkpoint: first what makes it one, for stock and for us; last what tells what the rest was.

    Payload and index files of another save stay, and then files whose names are the same in each save, too: a run that
    went back may be writing the same iteration anew.  Where that save commits between the last question and the end of
    the manifest, its objects stay, but the manifest is gone: a store compares and deletes nothing in one step.
    """
    own = _suffix_in(directory)
    if not may_go(directory):
        return False
    for name in (DCP_METADATA, MANIFEST_NAME):
        store_of(directory / name).remove()
    rest = [*everything_in(directory)]
    if own is not None:
        names = {path: _name(directory, path) for path in rest}
        shared = all(suffix_of(name) in ("", own) for name in names.values())
        rest = [path for path in rest if shared or (_is_own(names[path], own) and not is_head(names[path]))]
    for path in sorted(rest, key=lambda path: is_part(_name(directory, path))):
        if path.is_file():
            store_of(path).remove()
    return True


def _is_own(name: str, suffix: str) -> bool:
    return is_part(name) and suffix_of(name) == suffix


def _suffix_in(directory: AnyPath) -> str | None:
    """What the manifest says that its files' names end with; None where it does not say.  Stock's end with nothing."""
    if not (directory / MANIFEST_NAME).exists():
        return ""
    try:
        return read_manifest(directory).suffix
    except CheckpointError:
        return None

"""Commit without a rename, for object stores: the manifest is the marker, and it is written last.

    save to s3://bucket/run/iter_0000010
        __0_0-<token>.distcp, rank_00000-<token>.index, ...    beside those of an older save, if there is one
        manifest.json                                            one object: from here on the new ones count
        .metadata                                                stock's view, where it is wanted
        the older save's objects are deleted, once nobody waits for it

An object appears whole or not at all, so a save that overwrites is atomic, too.  A directory without a manifest is not
a checkpoint.  Files that the caller adds have fixed names: they are replaced before the manifest, and not listed in it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.storage.commit import removal
from mbridge_fsdp_ckpt.storage.commit.added import added_by, check_not_elsewhere
from mbridge_fsdp_ckpt.storage.commit.content import Content
from mbridge_fsdp_ckpt.storage.files import everything_in, replace_file
from mbridge_fsdp_ckpt.storage.format.manifest import read_manifest
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, MANIFEST_NAME, is_part, suffix_of, token
from mbridge_fsdp_ckpt.storage.store import AnyPath, store_of

_log = logging.getLogger(__name__)


class MarkerCommit:
    """See `content.Commit`."""

    def __init__(self, target: AnyPath) -> None:
        self.directory = target
        self.suffix = f"-{token()}"
        self._uploaded: list[AnyPath] = []
        self._committed = False
        target.mkdir(parents=True, exist_ok=True)

    def finish(self, content: Content) -> list[AnyPath]:
        """See `content.Commit`."""
        if content.add_files is not None:
            self._add(content.add_files, content.progress)
        content.last_call()
        replace_file(self.directory / MANIFEST_NAME, content.manifest(()))
        self._committed = True
        try:
            self._renew_view(content)
            return _objects(self.directory, without=self.suffix)
        except OSError as error:  # the checkpoint is there: no failure of the save
            _log.warning("stock's view or older objects in %s were left as they are: %s", self.directory, error)
            return []

    def _add(self, add_files: Callable[[Path], None], progress: Callable[[], None]) -> None:
        folder = Path(mkdtemp())
        try:
            names = added_by(add_files, folder)
            check_not_elsewhere(self.directory, names)
            for name in names:
                self._upload(folder / name, self.directory / name)
                progress()
        finally:
            removal.delete(folder)

    def _renew_view(self, content: Content) -> None:
        content.progress()
        if content.write_view is not None:
            content.write_view(self.directory)
        elif (self.directory / DCP_METADATA).exists():
            store_of(self.directory / DCP_METADATA).remove()
        content.progress()

    def _upload(self, path: Path, target: AnyPath) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._uploaded.append(target)
        with path.open("rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)

    def abort(self) -> None:
        """See `content.Commit`."""
        if self._committed:
            return
        doomed = [path for path in _objects(self.directory) if self.suffix in path.name]
        if not (self.directory / MANIFEST_NAME).exists():  # else an older checkpoint has files of these names
            doomed = [*self._uploaded, *doomed]  # in this order: see `condemned`
        removal.delete_later(doomed)


def _objects(directory: AnyPath, without: str = "") -> list[AnyPath]:
    found = [path for path in directory.iterdir() if suffix_of(path.name) not in ("", without)]
    return sorted(found, key=lambda path: path.name)


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


def condemned(target: AnyPath) -> list[AnyPath]:
    """Of the objects that dead saves of a target left, those that its next save may delete at once.

    The last one stays until that save commits, and so tells that other files there, which have no name of their own in
    each save, are nobody's: otherwise `target.check_replaceable` would refuse the target if that save died as well.
    """
    return dead_objects(target)[:-1]


def remove(directory: AnyPath) -> None:
    """Delete a checkpoint: first what makes it one, for stock and for us; last what tells what the rest was.

    Payload and index files of another save stay, and then files whose names are the same in each save, too: a run that
    went back may be writing the same iteration anew.
    """
    own = _suffix_in(directory)
    for name in (DCP_METADATA, MANIFEST_NAME):
        store_of(directory / name).remove()
    rest = [*everything_in(directory)]
    if own is not None:
        shared = all(suffix_of(path.name) in ("", own) for path in rest)
        rest = [path for path in rest if shared or (is_part(path.name) and suffix_of(path.name) == own)]
    for path in sorted(rest, key=lambda path: is_part(path.name)):
        if path.is_file():
            store_of(path).remove()


def _suffix_in(directory: AnyPath) -> str | None:
    """What the manifest says that its files' names end with; None where it does not say.  Stock's end with nothing."""
    if not (directory / MANIFEST_NAME).exists():
        return ""
    try:
        return read_manifest(directory).suffix
    except CheckpointError:
        return None

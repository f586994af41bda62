"""Files beside tensors that a rewritten checkpoint keeps: run configuration, train state, tokenizer and the like."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.errors import DamagedCheckpointError
from mbridge_fsdp_ckpt.storage.entries import ExtraEntry
from mbridge_fsdp_ckpt.storage.files import AnyPath, copy_file, is_plain_file, read_bounded
from mbridge_fsdp_ckpt.storage.format.names import DCP_METADATA, MANIFEST_NAME

_PARTS = re.compile(rf"{re.escape(MANIFEST_NAME)}|{re.escape(DCP_METADATA)}|chunks_\d+[^/]*\.jsonl|__[^/]*\.distcp")
_MAX_CONFIG_BYTES = 1 << 24
_yaml: Any = import_module("yaml")  # of OmegaConf; it brings no types


def other_files(directory: AnyPath) -> list[str]:
    """The files of a checkpoint that are neither payload nor head nor tables, by their names in it.

    Raises:
        DamagedCheckpointError: One is a link, or no file; or has a name that the format does not allow.
    """
    names = sorted(name for name in _names(directory) if not _PARTS.fullmatch(name))
    for name in names:
        try:
            ExtraEntry(name=name, size=0, checksum="")
        except ValueError as error:
            raise _refused(directory / name, "another name") from error
    return names


def _names(directory: AnyPath) -> Iterator[str]:
    if not isinstance(directory, Path):
        for path in directory.rglob("*"):
            if path.is_file():
                yield path.relative_to(directory).as_posix()
        return
    for folder, folders, files in os.walk(directory):
        below = directory / os.path.relpath(folder, directory)
        for entry in (below / name for name in (*folders, *files)):
            name = entry.relative_to(directory).as_posix()
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                raise _refused(entry, "a symbolic link" if entry.is_symlink() else "a special file")
            if entry.is_file():
                yield name


def _refused(path: AnyPath, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        expected="plain files beside the tensors, to be carried over",
        found=found,
        remedy="Replace it by the file itself, or move it out of the checkpoint.",
        key=str(path),
    )


def carry_over(
    directory: AnyPath,
    names: Iterable[str],
    into: Path,
    listed: Mapping[str, ExtraEntry],
    edit: Callable[[bytes], bytes],
) -> None:
    """Copy files, block by block; those that the source lists are verified.

    Args:
        directory: The checkpoint they are in.
        names: Their names.
        into: Where they go.
        listed: Entries of those with a checksum.
        edit: Changes the run configuration.

    Raises:
        DamagedCheckpointError: A file is not what was written.
    """
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(directory / name, into / name, listed.get(name), listed_in=MANIFEST_NAME)
    config = into / RUN_CONFIG
    if config.is_file():
        config.write_bytes(edit(config.read_bytes()))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Bridge's `run_config.yaml`: looked at and edited as text; no object of it is ever made.

    Args:
        text: Its content.
        root: YAML's node of it; None where it is no mapping.
    """

    text: str
    root: Any = None

    @classmethod
    def of(cls, data: bytes) -> RunConfig:
        """The configuration in a file; an empty one where it is not legible."""
        text = data.decode(errors="surrogateescape")
        try:
            root = _yaml.compose(text, Loader=_yaml.SafeLoader)
        except (_yaml.YAMLError, RecursionError, ValueError):
            root = None
        return cls(text, root if isinstance(root, _yaml.MappingNode) else None)

    @classmethod
    def read(cls, directory: AnyPath) -> RunConfig:
        """A checkpoint's configuration; an empty one where it has none.

        Raises:
            ManifestError: It is larger than 16 MiB.
        """
        path = directory / RUN_CONFIG
        return cls.of(read_bounded(path, _MAX_CONFIG_BYTES)) if is_plain_file(path) else cls("")

    def get(self, section: str, name: str) -> str | None:
        """A setting as it is written; None where there is none."""
        node = self._node(section, name)
        return None if node is None else str(node.value)

    def with_setting(self, section: str, name: str, value: str) -> RunConfig:
        """The same with a setting that is there changed; where it is not there, the same."""
        node = self._node(section, name)
        if node is None:
            return self
        start, end = node.start_mark.index, node.end_mark.index
        return RunConfig.of((self.text[:start] + value + self.text[end:]).encode(errors="surrogateescape"))

    def encoded(self) -> bytes:
        """The file's content."""
        return self.text.encode(errors="surrogateescape")

    def _node(self, section: str, name: str) -> Any:
        inner = _child(self.root, section)
        found = _child(inner, name)
        return found if isinstance(found, _yaml.ScalarNode) else None


def _child(node: Any, name: str) -> Any:
    if not isinstance(node, _yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)

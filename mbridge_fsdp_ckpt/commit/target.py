# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What may be replaced: a save destroys checkpoints, and nothing else.

    replaced    nothing there, an empty directory, a checkpoint of this format or stock's with whatever else lies in it,
                what is left of one whose save or removal died, leftovers of dead saves of this package
    refused     everything else, by name: files, links, other formats, roots of checkpoints, the working directory and
                what it lies in

A link is refused even if it leads to a checkpoint: the rename of a commit would replace the link, not what it leads to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mbridge_fsdp_ckpt.commit.lease import is_stale
from mbridge_fsdp_ckpt.errors import CheckpointError, ConfigurationError
from mbridge_fsdp_ckpt.format.kinds import DirectoryKind, is_hugging_face, is_torch_dist
from mbridge_fsdp_ckpt.format.names import (
    DCP_METADATA,
    DELETED,
    FORMAT_NAME,
    MANIFEST_NAME,
    REPLACED,
    STAGING,
    STATE_TRACKER,
    TRACKER,
    is_head,
    is_part,
    iteration_name,
    iteration_of,
    read_of,
    target_of,
)
from mbridge_fsdp_ckpt.io.file_system import TEMPORARY
from mbridge_fsdp_ckpt.io.files import entries, everything_in, is_plain_file
from mbridge_fsdp_ckpt.io.store import AnyPath, is_local, store_of

_HEAD_BYTES = 1 << 12  # the manifest names its format in its first line
_NAMED = 5  # entries that an error lists


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a directory must not be replaced.

    Args:
        found: A text that says what is there.
        remedy: What the user can do.
    """

    found: str
    remedy: str


def check_replaceable(target: AnyPath, working: Path | None = None) -> None:
    """Check that a checkpoint may take the target's place; changes nothing.

    Args:
        target: The checkpoint directory that is to be made or replaced.
        working: The job's working directory; None means that of this process.

    Raises:
        ConfigurationError: The target is something other than a checkpoint: a file, a directory of another format or
            with other files, or a root of checkpoints.  Or it is a link, even to a checkpoint, or the working directory
            or one of its parents.
        OSError: The storage could not be read.
    """
    obstacle_found = obstacle(target, working)
    if obstacle_found is not None:
        raise ConfigurationError(
            expected="a directory that does not exist, is empty, or holds a checkpoint and may be replaced",
            found=obstacle_found.found,
            remedy=f"Nothing was changed. {obstacle_found.remedy}",
            key=str(target),
        )


def obstacle(target: AnyPath, working: Path | None = None) -> Obstacle | None:
    """Why the target must not be replaced or removed; None where it may be.  See `check_replaceable`."""
    inside = f"Give a directory in it, such as {target / iteration_name(1)}."
    if target.name in (".", ".."):
        return Obstacle(f"a path that ends in {target.name}", "Give the directory by its own name.")
    local = store_of(target).local
    if local is not None:
        target = local.parent.resolve() / local.name  # a commit makes x where it is to write to x/../target
        if target.is_symlink():
            return _link(target)
        if where := _around(target, working):
            return Obstacle(where, inside)
    if not target.exists():
        return None
    if not target.is_dir():
        return Obstacle("a file", "Give a directory, or move the file away.")
    names = names_in(target)
    if is_root(target, names):
        return Obstacle(f"a root of checkpoints, with {_listed(names)}", inside)
    if _is_checkpoint(target, names) or all(_counts_for_nothing(target / name) for name in names):
        return None
    return Obstacle(_kind(names), f"{inside[:-1]}, or move away what is there.")


def _link(link: Path) -> Obstacle:
    if link.exists():
        return Obstacle(f"a link to {link.resolve()}", "Give the directory that it leads to, or remove the link.")
    return Obstacle(f"a link to {link.readlink()}, which does not exist", "Remove the link, or give another directory.")


def _around(target: Path, working: Path | None) -> str:
    """In words, that the job works in the target; empty where it does not."""
    try:
        here = (working or Path.cwd()).resolve()
    except FileNotFoundError:  # removed meanwhile: nobody can replace it
        return ""
    target = target.resolve()
    if here == target:
        return "the working directory"
    return f"a parent of the working directory, {here}" if here.is_relative_to(target) else ""


def names_in(directory: AnyPath) -> set[str]:
    """Of its entries.

    The empty object that a console makes for a folder is listed in it, under a name that leads to nothing: its own.
    """
    entries: list[AnyPath] = [*directory.iterdir()]
    return {path.name for path in entries if path.name != directory.name or is_local(path) or path.exists()}


def is_root(directory: AnyPath, names: set[str]) -> bool:
    """Whether checkpoints lie in it, or did.  With metadata of its own it is a root all the same."""
    if {TRACKER, STATE_TRACKER} & names or any(iteration_of(name) is not None for name in names):
        return True
    if is_local(directory):
        files = [path / metadata for path in entries(directory) for metadata in (MANIFEST_NAME, DCP_METADATA)]
        below = [path.parent for path in files if path.exists()]
    else:  # one listing, not a request for each
        below = [path.parent for path in everything_in(directory) if path.name in (MANIFEST_NAME, DCP_METADATA)]
        below = [path for path in below if path.parent == directory]
    return any(_is_checkpoint(path, names_in(path)) for path in below if not path.name.startswith((STAGING, DELETED)))


def _is_checkpoint(directory: AnyPath, names: set[str]) -> bool:
    """Whether it is a checkpoint that this package reads, or what is left of one: payload or index files.

    Others use the names of the metadata, too: a manifest has to name the format, and `.metadata` has to have stock's
    keys.
    """
    if is_torch_dist(names) or _is_of_another(directory, names):
        return False
    if any(is_part(name) and not is_head(name) for name in names):
        return True
    if DCP_METADATA in names and is_plain_file(directory / DCP_METADATA):
        return True
    return MANIFEST_NAME in names and _names_the_format(directory / MANIFEST_NAME)


def _is_of_another(directory: AnyPath, names: set[str]) -> bool:
    """Whether `.metadata` is that of another checkpoint of torch's; of one that cannot be read nothing tells."""
    if DCP_METADATA not in names or MANIFEST_NAME in names:
        return False
    from mbridge_fsdp_ckpt.opening import kind_of  # it imports DCP, which a checkpoint process does without

    try:
        return kind_of(directory) is not DirectoryKind.STOCK
    except CheckpointError:
        return False


def _names_the_format(manifest: AnyPath) -> bool:
    if not is_plain_file(manifest):
        return False
    with store_of(manifest).opened() as file:
        return FORMAT_NAME.encode() in file.read(_HEAD_BYTES)


def _counts_for_nothing(path: AnyPath) -> bool:
    """Whether nobody misses it: a leftover of this package, or a folder without a file in it.

    A staging directory that was renewed within the hour may be a living job's.
    """
    if target_of(path.name) or read_of(path.name):
        return path.name.startswith(DELETED) or (not path.name.startswith(REPLACED) and is_stale(path))
    if store_of(path).is_link():
        return False
    if path.is_dir():
        return all(found.is_dir() and not store_of(found).is_link() for found in everything_in(path))
    return TEMPORARY.fullmatch(path.name) is not None


def _kind(names: set[str]) -> str:
    if is_torch_dist(names):
        return f"a checkpoint in another format (torch_dist), with {_listed(names)}"
    if DCP_METADATA in names:
        return f"a checkpoint of torch.distributed.checkpoint, not of stock, with {_listed(names)}"
    if is_hugging_face(names):
        return f"a Hugging Face model, with {_listed(names)}"
    return f"a directory that is no checkpoint, with {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:_NAMED], sorted(names)[_NAMED:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")

"""The root of a run's checkpoints: iteration directories, and the tracker file that names the newest of them."""

from __future__ import annotations

from mbridge_fsdp_ckpt.errors import NotACheckpointError
from mbridge_fsdp_ckpt.storage.commit.methods import recover
from mbridge_fsdp_ckpt.storage.files import is_plain_file, read_bounded
from mbridge_fsdp_ckpt.storage.format import names
from mbridge_fsdp_ckpt.storage.format.head import has_head
from mbridge_fsdp_ckpt.storage.store import AnyPath

TRACKER = names.TRACKER
RELEASE = "release"
_MAX_TRACKER_BYTES = 1 << 12


def tracked(root: AnyPath) -> str | None:
    """What the tracker file says; None where there is none."""
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    with tracker.open("rb") as file:
        return bytes(file.read(100)).decode(errors="replace").strip()


def find_checkpoint(path: AnyPath) -> AnyPath:
    """The iteration directory: the path itself, or the one that the tracker file of a run's root names.

    If a save died between its two renames, the directory that the tracker names is moved back first.

    Raises:
        NotACheckpointError: There is neither.
        ManifestError: The tracker is no small file.
    """
    tracker = path / TRACKER
    if has_head(path) or not is_plain_file(tracker):
        return path
    named = read_bounded(tracker, _MAX_TRACKER_BYTES).decode(errors="replace").strip()[:100]
    directory = path / (names.iteration_name(int(named)) if named.isdecimal() else named)
    known = named == RELEASE or named.isdecimal()
    if known:
        recover(directory)
    if not known or not directory.is_dir():
        raise NotACheckpointError(
            expected=f"{TRACKER} to name an iteration directory beside it",
            found=repr(named),
            remedy="Give an iteration directory (iter_0000010).",
            key=str(tracker),
        )
    return directory

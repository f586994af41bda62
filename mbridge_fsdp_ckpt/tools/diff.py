# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The differences of two checkpoints, whatever layout and format they were saved in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from mbridge_fsdp_ckpt.commit.retention import reading
from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.kinds import TORCH_DIST_COMMON
from mbridge_fsdp_ckpt.format.names import PROGRESS, TRAIN_STATE
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.source import CheckpointSource, batches
from mbridge_fsdp_ckpt.io.files import file_checksum, is_plain_file
from mbridge_fsdp_ckpt.io.progress import Progress
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.opening import open_any
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.compare import (
    Container,
    Side,
    Tolerance,
    Unequal,
    compare_key,
    flattened,
    unlike,
)
from mbridge_fsdp_ckpt.tools.convert.other_files import Beside, beside_tensors
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import read_common_file

_ABSENT = "(absent)"


@dataclass(slots=True)
class Differences:
    """All that differs, by name.

    Args:
        compared: Tensors whose elements were compared.
        looked_at: All names under which anything was compared.
    """

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    structure: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, Unequal] = field(default_factory=dict)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    compared: int = 0
    looked_at: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether there are none."""
        return not (self.only_in_a or self.only_in_b or self.structure or self.tensors or self.values)


def differences(
    a: AnyPath, b: AnyPath, tolerance: Tolerance, *, pattern: str = "*", values: bool = True, progress: Progress
) -> Differences:
    """Find all that differs; nobody prunes either of them meanwhile.

    Args:
        a: A checkpoint.
        b: The other one.
        tolerance: When numbers count as equal.
        pattern: What the compared names match.
        values: Whether to compare what tensors and other state hold, too.
        progress: Receives the progress.

    Raises:
        CheckpointError: One of them cannot be read.
        ConfigurationError: There is nothing that could be compared.
    """
    with reading(a) as alive, reading(b) as other_alive:

        def advance(count: int) -> None:
            alive()
            other_alive()
            progress.advance(count)

        one, other, found = _Opened(open_any(a)), _Opened(open_any(b)), Differences()
        same = _compare_keys(one.source, other.source, pattern, found)
        if not values:
            found.notes.append("what tensors and other state hold was not compared (--no-values)")
        else:
            _compare_values(one, other, pattern, found)
            _name_what_is_left_out(one.source, other.source, found, lambda: advance(0))
        if not found.looked_at:
            raise _nothing(pattern)
        if not values:
            return found
        progress.begin("comparing", sum(one.source.metadata.keys[name].nbytes for name in same))
        _compare_tensors(one.source, other.source, same, tolerance, found, advance)
    return found


def _nothing(pattern: str) -> ConfigurationError:
    return ConfigurationError(
        expected="tensors or other state to compare",
        found="none in either checkpoint" + ("" if pattern == "*" else f" whose name is like {pattern}"),
        remedy="Nothing was compared. Look with inspect at what they hold.",
    )


class _Opened:
    """A checkpoint, and its state beside tensors of model and optimizer."""

    def __init__(self, source: SafeSource | DcpSource) -> None:
        self.source = source
        self.values: dict[str, Any] = dict(source.metadata.values)
        self.unread: list[str] = []
        if isinstance(source, DcpSource):
            self._read_rest(source)

    def _read_rest(self, source: DcpSource) -> None:
        """Of stock, and of others of torch: every entry, and Megatron's files of state beside them."""
        found, self.unread = source.read_rest("rng_state")
        self.values |= found
        directory = source.metadata.directory
        if is_plain_file(directory / TORCH_DIST_COMMON):
            self.values[TORCH_DIST_COMMON] = read_common_file(directory)
        known = source.metadata.values
        self.values |= {PROGRESS: known[PROGRESS]} if PROGRESS in known else source.read_train_state()


def _compare_keys(a: CheckpointSource, b: CheckpointSource, pattern: str, found: Differences) -> list[str]:
    """Fills in what differs in structure; returns the keys that don't."""
    ours, theirs = ({key for key in source.metadata.keys if fnmatchcase(key, pattern)} for source in (a, b))
    found.looked_at += len(ours | theirs)
    found.only_in_a, found.only_in_b = sorted(ours - theirs), sorted(theirs - ours)
    same = []
    for key in sorted(ours & theirs):
        left, right = a.metadata.keys[key], b.metadata.keys[key]
        if (left.dtype, left.shape) == (right.dtype, right.shape):
            same.append(key)
        else:
            found.structure[key] = _structure(left), _structure(right)
    return same


def _structure(entry: KeyEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _compare_tensors(
    a: CheckpointSource,
    b: CheckpointSource,
    keys: list[str],
    tolerance: Tolerance,
    found: Differences,
    progress: Callable[[int], None],
) -> None:
    for group in batches(keys, a, b):
        ours, theirs = a.chunks(group), b.chunks(group)
        for key in group:
            unequal = compare_key(key, Side(a, ours[key]), Side(b, theirs[key]), tolerance, progress)
            found.compared += 1
            if unequal.elements:
                found.tensors[key] = unequal


def _compare_values(one: _Opened, other: _Opened, pattern: str, found: Differences) -> None:
    a, b, ours, theirs = one.source, other.source, one.values, other.values
    unread = sorted({*one.unread, *other.unread})
    if unread:
        found.notes.append(f"not compared, being no plain data: {', '.join(unread)}")
    if a.metadata.format != b.metadata.format:
        apart = sorted(ours.keys() ^ theirs.keys())
        if apart:
            found.notes.append(f"values that one of the formats does not have were not compared: {', '.join(apart)}")
        ours, theirs = ({name: side[name] for name in side if name not in apart} for side in (ours, theirs))
    left, right = (flattened(values, "values") | _by_parameter(source) for values, source in ((ours, a), (theirs, b)))
    leaves = {name for side in (left, right) for name, value in side.items() if not isinstance(value, Container)}
    found.looked_at += sum(fnmatchcase(name, pattern) for name in leaves)
    for name in sorted(unlike(left, right)):
        if fnmatchcase(name, pattern):
            found.values[name] = _text(left, name), _text(right, name)


def _name_what_is_left_out(
    a: CheckpointSource, b: CheckpointSource, found: Differences, progress: Callable[[], None]
) -> None:
    """Note what is in the checkpoints, and was not compared."""
    own = {name for source in (a, b) for record in islice(source.ranks(), 1) for name in record.values}
    if own:
        found.notes.append(f"not compared, being of single ranks: {', '.join(sorted(own))}")
    beside = [beside_tensors(source.metadata.directory) for source in (a, b)]
    ours, theirs = (_checksums(*pair, progress) for pair in zip((a, b), beside, strict=True))
    unlike = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if unlike:
        found.notes.append(f"files beside the tensors are others, which was not looked into: {_listed(unlike)}")
    special = sorted({name for side in beside for name in side.others})
    if special:
        found.notes.append(f"not compared, being no plain files: {_listed(special)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _checksums(source: CheckpointSource, beside: Beside, progress: Callable[[], None]) -> dict[str, str]:
    """Of files beside the tensors, as the metadata lists them, or else read; train state is compared by its content."""
    directory, listed = source.metadata.directory, {entry.name: entry.checksum for entry in source.metadata.files}
    return {
        name: listed.get(stored) or file_checksum(directory / stored, progress)
        for name, stored in beside.files.items()
        if name not in (TRAIN_STATE, TORCH_DIST_COMMON)
    }


def _by_parameter(source: CheckpointSource) -> dict[str, Any]:
    """Hyperparameters under the names of parameters as they are, dots and all."""
    found: dict[str, Any] = {}
    for name, values in source.hyperparameters().items():
        found |= flattened(values, f"hyperparameters.{name}")
    return found


def _text(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return _ABSENT
    value = values[name]
    return f"(a {value.kind})" if isinstance(value, Container) else repr(value)[:200]

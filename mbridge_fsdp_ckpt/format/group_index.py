# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The index file of a group of ranks: theirs merged into one, so that a key's rows lie together.

Merging is a function of the files alone: who has them can tell whether a group's index is the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.errors import PlanDisagreementError
from mbridge_fsdp_ckpt.format import columns
from mbridge_fsdp_ckpt.format.columns import Array, Columns
from mbridge_fsdp_ckpt.format.index_checks import sharded_keys
from mbridge_fsdp_ckpt.plan.keys import KeyEntry


def merged(parts: Sequence[Columns]) -> Columns:
    """The arrays of a group's index file: every row, and of the numbers those that count.

    Args:
        parts: The arrays of the ranks' own index files, of one save, by rank.

    Raises:
        PlanDisagreementError: Two ranks describe a key differently, or both wrote its first element.
    """
    parts = [_without_private(part) for part in parts]
    if len(parts) == 1:
        return replace(parts[0], record=b"")
    keys = _Keys(parts)
    names, name_texts = _names(parts)
    base = sum(map(len, keys.texts))
    names["text"] = base + np.cumsum([len(text) for text in name_texts], dtype=np.uint64) if name_texts else 0
    axes = tuple(dict.fromkeys(axis for part in parts for axis in part.axes))
    return Columns(
        save=parts[0].save,
        suffix=parts[0].suffix,
        axes=axes,
        entries=keys.entries,
        ranks=np.concatenate([part.ranks for part in parts]),
        coordinates=np.concatenate([_along(part, axes) for part in parts]),
        keys=keys.array(),
        names=names,
        numbers=keys.numbers(),
        texts=b"".join((*keys.texts, *name_texts)),
        rows=keys.rows(),
    )


def _private(part: Columns) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which keys and which names are for the rank alone."""
    numbers = ~sharded_keys(part.entries, part.keys)
    return numbers & (part.keys["origins"] == 0), part.names["kind"] == columns.PARAM_GROUP


def _without_private(part: Columns) -> Columns:
    """A rank's index, without what is for that rank alone."""
    of_keys, of_names = _private(part)
    if not (of_keys.any() or of_names.any()):
        return part
    numbers = ~sharded_keys(part.entries, part.keys)
    keys, names = part.keys[~of_keys], part.names[~of_names]
    kept = numbers[~of_keys]
    keys["first"][kept] = np.arange(np.count_nonzero(kept))
    dropped = np.concatenate((of_keys, of_names))
    lengths = np.diff(np.concatenate((part.keys["text"], part.names["text"])), prepend=np.uint64(0)).astype(np.intp)
    ends = np.cumsum(lengths[~dropped])
    keys["text"], names["text"] = ends[: len(keys)], ends[len(keys) :]
    texts = np.frombuffer(part.texts, dtype=np.uint8)[~np.repeat(dropped, lengths)].tobytes()
    return replace(part, keys=keys, names=names, numbers=part.numbers[~of_keys[numbers]], texts=texts)


def _along(part: Columns, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """A part's coordinates along all axes."""
    found = np.full((len(part.ranks), len(axes)), -1, dtype=columns.COORDINATE)
    for place, axis in enumerate(part.axes):
        found[:, axes.index(axis)] = part.coordinates[:, place]
    return found


class _Keys:
    """The keys of all parts, each once."""

    def __init__(self, parts: Sequence[Columns]) -> None:
        self._parts = parts
        self._first_rank = np.cumsum([0, *(len(part.ranks) for part in parts)])
        known: dict[KeyEntry, int] = {}
        for part in parts:
            for entry in part.entries:
                known.setdefault(entry, len(known))
        self.entries = tuple(known)
        every = np.concatenate([part.keys for part in parts])
        descriptions = [np.array([known[entry] for entry in part.entries], dtype=np.uint32) for part in parts]
        entry = np.concatenate([map_[part.keys["entry"]] for map_, part in zip(descriptions, parts, strict=True)])
        _, first, self._place = np.unique(every["hash"], return_index=True, return_inverse=True)
        self._keys = every[first].copy()
        self._keys["entry"] = entry[first]
        self._check_texts(first)
        self._check(entry != self._keys["entry"][self._place], "one description of each key", "different descriptions")
        origins = np.bincount(self._place, every["origins"], len(first)).astype(np.uint32)
        self._check(origins[self._place] > 1, "one rank to write the first element of a tensor", "several writers")
        self._keys["origins"] = origins
        self._sharded = sharded_keys(self.entries, self._keys)
        counts = np.bincount(self._place, every["count"].astype(np.float64), len(first)).astype(np.uint64)
        self._keys["count"] = counts
        for mask in (self._sharded, ~self._sharded):
            self._keys["first"][mask] = np.cumsum(counts[mask]) - counts[mask]

    def _check_texts(self, first: npt.NDArray[np.intp]) -> None:
        every = [text for part in self._parts for text in _texts(part.texts, part.keys["text"], 0)]
        self.texts = [every[place] for place in first]
        unlike = [text != self.texts[place] for text, place in zip(every, self._place, strict=True)]
        self._check(np.array(unlike, dtype=bool), "keys of different hashes", "two keys with the same hash")

    def _check(self, bad: npt.NDArray[np.bool_], expected: str, found: str) -> None:
        """Raise for the first bad one among the keys of all parts."""
        if not bad.any():
            return
        place = self._place[np.flatnonzero(bad)[0]]
        holders = [part.ranks["rank"][0] for part in self._parts if self._keys["hash"][place] in part.keys["hash"]]
        raise PlanDisagreementError(
            expected=expected,
            found=f"{found}: ranks {', '.join(map(str, holders[:8]))} have the key",
            remedy="The ranks hold different models, or do not know of each other. Nothing was committed.",
            key=self.texts[place].decode(errors="replace"),
        )

    def array(self) -> Array:
        """The keys by hash."""
        self._keys["text"] = np.cumsum([len(text) for text in self.texts], dtype=np.uint64)
        return self._keys

    def rows(self) -> Array:
        """All rows by key and offset."""
        dimensions = max(part.rows.dtype["start"].shape[0] for part in self._parts)
        parts = [self._ranked(_widened(part.rows, dimensions), number) for number, part in enumerate(self._parts)]
        rows: Array = np.concatenate(parts)
        owner = np.concatenate([np.repeat(places, counts) for places, counts in self._held(sharded=True)])
        order = np.lexsort((*(rows["start"][:, d] for d in reversed(range(dimensions))), owner))
        found: Array = rows[order]
        return found

    def numbers(self) -> Array:
        """All numbers by key."""
        numbers = np.concatenate([self._ranked(part.numbers.copy(), i) for i, part in enumerate(self._parts)])
        owner = np.concatenate([places for places, _ in self._held(sharded=False)])
        return numbers[np.argsort(owner, kind="stable")]

    def _ranked(self, array: Array, part: int) -> Array:
        array["rank"] += np.uint32(self._first_rank[part])
        return array

    def _held(self, *, sharded: bool) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64]]]:
        """For each part, the places of its keys among all, and how many rows each has there."""
        found, begin = [], 0
        for part in self._parts:
            places = self._place[begin : begin + len(part.keys)]
            begin += len(part.keys)
            mask = self._sharded[places] == sharded
            found.append((places[mask], part.keys["count"][mask].astype(np.intp)))
        return found


def _texts(texts: bytes, ends: npt.NDArray[np.uint64], begin: int) -> list[bytes]:
    bounds = [begin, *ends.tolist()]
    return [texts[first:last] for first, last in pairwise(bounds)]


def _widened(rows: Array, dimensions: int) -> Array:
    """Rows with boxes of so many dimensions; a copy."""
    if rows.dtype["start"].shape[0] == dimensions:
        return rows.copy()
    wide = np.zeros(len(rows), dtype=columns.row_dtype(dimensions))
    for name in rows.dtype.names or ():
        if name in ("start", "extent"):
            wide[name][:, : rows[name].shape[1]] = rows[name]
        else:
            wide[name] = rows[name]
    return wide


def _names(parts: Sequence[Columns]) -> tuple[Array, list[bytes]]:
    """Names of all parts by kind and hash, with their texts; of a parameter what the first rank says counts."""
    arrays, texts, first_rank = [], list[bytes](), 0
    for part in parts:
        array = part.names.copy()
        array["rank"] += np.uint32(first_rank)
        arrays.append(array)
        base = int(part.keys["text"][-1]) if len(part.keys) else 0
        texts += _texts(part.texts, part.names["text"], base)
        first_rank += len(part.ranks)
    names = np.concatenate(arrays)
    order = np.lexsort((names["rank"], names["hash"], names["kind"]))
    names = names[order]
    again = (names["kind"][1:] == names["kind"][:-1]) & (names["hash"][1:] == names["hash"][:-1])
    kept = np.flatnonzero(
        np.concatenate((np.ones(min(1, len(names)), bool), ~again)) | (names["kind"] == columns.STATE)
    )
    return names[kept], [texts[order[place]] for place in kept.tolist()]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint as a whole: the directories of its groups' index files, and its keys as a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mbridge_fsdp_ckpt.format.columns import key_hash
from mbridge_fsdp_ckpt.format.index import IndexFile
from mbridge_fsdp_ckpt.io.files import malformed
from mbridge_fsdp_ckpt.plan.keys import KeyEntry


class _Places:
    """Places in the arrays of several files, by hash.

    Args:
        hashes: Of each file's array.
    """

    def __init__(self, hashes: Sequence[npt.NDArray[np.uint64]]) -> None:
        every = np.concatenate([np.zeros(0, dtype=np.uint64), *hashes])
        self.order = np.argsort(every, kind="stable")
        self.hashes = every[self.order]
        self._begins = np.cumsum([0, *map(len, hashes)])

    def of(self, text: str) -> Iterator[tuple[int, int]]:
        """Where there may be a text: the number of a file, and a place in its array."""
        hashed = np.uint64(key_hash(text.encode(errors="surrogatepass")))
        begin, end = self.hashes.searchsorted(hashed, "left"), self.hashes.searchsorted(hashed, "right")
        return map(self.within, self.order[begin:end].tolist())

    def within(self, place: int) -> tuple[int, int]:
        """A place among all: the number of its file, and the place there."""
        number = int(self._begins.searchsorted(place, "right")) - 1
        return number, place - int(self._begins[number])


class Directory:
    """Where keys and names are, over all groups.

    Args:
        groups: Their index files, which together have every row once.
    """

    def __init__(self, groups: Sequence[IndexFile]) -> None:
        self.groups = groups
        self._keys = _Places([group.keys["hash"] for group in groups])
        self._names = _Places([group.names["hash"] for group in groups])

    def places(self, key: str) -> list[tuple[IndexFile, int]]:
        """The groups that have rows of a key, each with the key's place there.

        Raises:
            ManifestError: They describe it differently.
        """
        every = ((self.groups[number], place) for number, place in self._keys.of(key))
        found = [(group, place) for group, place in every if group.text_of_key(place) == key]
        for group, within in found[1:]:
            if group.entry(within) != found[0][0].entry(found[0][1]):
                raise malformed(group.path, f"{key} as in {found[0][0].path.name}", str(group.entry(within)))
        return found

    def by_group(self, keys: Iterable[str]) -> Iterator[tuple[IndexFile, dict[int, str]]]:
        """The groups that have rows of keys, each with the keys by their place there, in order."""
        wanted: dict[int, dict[int, str]] = {}
        numbers = {id(group): number for number, group in enumerate(self.groups)}
        for key in keys:
            for group, place in self.places(key):
                wanted.setdefault(numbers[id(group)], {})[place] = key
        for number, places in sorted(wanted.items()):
            yield self.groups[number], dict(sorted(places.items()))

    def names(self, kind: int, name: str) -> Iterator[tuple[IndexFile, int]]:
        """The groups that have a name of a kind, each with its places there."""
        for number, place in self._names.of(name):
            group = self.groups[number]
            if group.names["kind"][place] == kind and group.text_of_name(place) == name:
                yield group, place

    def entries(self) -> dict[str, KeyEntry]:
        """All keys, sorted."""
        found: dict[str, KeyEntry] = {}
        for group in self.groups:
            for place in range(len(group.keys)):
                key, entry = group.text_of_key(place), group.entry(place)
                if found.setdefault(key, entry) != entry:
                    raise malformed(group.path, f"{key} as other groups have it: {found[key]}", str(entry))
        return dict(sorted(found.items()))

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(np.unique(self._keys.hashes))

    def without_one_origin(self) -> list[tuple[str, int]]:
        """Keys whose first element not exactly one rank has written, with how many have."""
        if not len(self._keys.hashes):
            return []
        every = np.concatenate([group.keys["origins"] for group in self.groups])[self._keys.order]
        _, first = np.unique(self._keys.hashes, return_index=True)
        totals = np.add.reduceat(every, first)
        return [(self._text(int(first[place])), int(totals[place])) for place in np.flatnonzero(totals != 1)]

    def _text(self, place: int) -> str:
        number, within = self._keys.within(int(self._keys.order[place]))
        return self.groups[number].text_of_key(within)


class IndexedKeys(Mapping[str, KeyEntry]):
    """Keys with their descriptions: one is looked up; only who goes through them reads them all.

    Args:
        lookup: Finds one.
        read: All, sorted.
        count: How many there are.
    """

    def __init__(
        self, lookup: Callable[[str], KeyEntry | None], read: Callable[[], dict[str, KeyEntry]], count: int
    ) -> None:
        self._lookup, self._read, self._count = lookup, read, count
        self._all: dict[str, KeyEntry] | None = None
        self._known: dict[str, KeyEntry | None] = {}

    def __getitem__(self, key: str) -> KeyEntry:
        if self._all is not None:
            return self._all[key]
        if key not in self._known:
            self._known[key] = self._lookup(key)
        entry = self._known[key]
        if entry is None:
            raise KeyError(key)
        return entry

    def __iter__(self) -> Iterator[str]:
        if self._all is None:
            self._all = self._read()
        return iter(self._all)

    def __len__(self) -> int:
        return self._count

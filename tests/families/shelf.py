# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""References and checkpoints that tests share: each is made once, when a test first asks for it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from testing.ranks import RankPool
from tests.core import oracle
from tests.families import cases
from tests.families.reference import Layout


class Shelf:
    """What a pool of ranks made so far, in a folder."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._references: dict[str, Path] = {}
        self._saved: dict[tuple[str, Layout], Path] = {}
        self._digests: dict[Path, oracle.Digests] = {}
        self._number = count()

    def reference(self, model: str) -> Path:
        """The unsharded model in Megatron's own checkpoint."""
        if model not in self._references:
            directory = self._new("reference")
            self._pool.run(cases.reference, str(directory), model, ranks=1)
            self._references[model] = directory
        return self._references[model]

    def saved(self, model: str, layout: Layout) -> Path:
        """The same model in a checkpoint of this package."""
        if (model, layout) not in self._saved:
            directory = self._new("checkpoint")
            ranks = self._pool.run(
                cases.save, str(directory), str(self.reference(model)), model, layout, ranks=layout.ranks
            )
            _check_complete(ranks)
            self._saved[model, layout] = directory
        return self._saved[model, layout]

    def on_disk(self, directory: Path) -> oracle.Digests:
        """Digests of a checkpoint's tensors, as torch reads them."""
        if directory not in self._digests:
            self._digests[directory] = oracle.on_disk(directory)
        return self._digests[directory]

    def check(self, model: str, saved_in: Layout, loaded_in: Layout, other_model: str = "") -> None:
        """Load a checkpoint in another layout, maybe into another model that holds the same; save it again."""
        first, again = self.saved(model, saved_in), self._new("again")
        loaded = other_model or model
        ranks = self._pool.run(
            cases.load, str(first), str(self.reference(model)), loaded, loaded_in, str(again), ranks=loaded_in.ranks
        )
        assert {name for rank in ranks for name in rank["different"]} == set()
        _check_complete(ranks)
        differed = {name for rank in ranks for name in rank["before"]}
        assert all(rank["compared"] <= differed for rank in ranks), "some weights were right before the load"
        assert self.on_disk(again) == self.on_disk(first)

    def _new(self, kind: str) -> Path:
        return self._folder / f"{kind}-{next(self._number)}"


def _check_complete(ranks: list[dict[str, Any]]) -> None:
    """Every parameter that trains had its optimizer state compared, on whichever rank holds it."""
    trained = {name for rank in ranks for name in rank["trained"]}
    assert trained
    assert trained == {name for rank in ranks for name in rank["slots"]}

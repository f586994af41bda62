# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Damages to the files of a checkpoint, one at a time, and what a load makes of each.

A damage is a kind, a file and a seed.  What it does to the files' bytes is a pure function of these and of the files
before, so that a line of a failure's message is enough to repeat it.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.tools.verify import verify
from testing.models import Recipe
from tests.core import cases, oracle

MANIFEST = "manifest.json"
WORD = struct.Struct("<Q")
RECIPE = Recipe(layers=1)

Files = Mapping[str, bytes]
Changed = dict[str, bytes | None]
"""New contents by name; None deletes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One damage; `other` is the second file of a swap."""

    kind: str
    name: str
    seed: int
    other: str = ""


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit of one byte."""
    position, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def truncated(data: bytes, rng: random.Random) -> bytes:
    """Cut short: by a few bytes, or anywhere."""
    few = rng.randrange(1, min(64, len(data)) + 1)
    return data[:-few] if rng.random() < 0.5 else data[: rng.randrange(len(data))]


def appended(data: bytes, rng: random.Random) -> bytes:
    """Bytes behind the end: zeros as a file system leaves them, random ones, or the beginning again."""
    count = rng.randrange(1, 65)
    return data + rng.choice([bytes(count), rng.randbytes(count), data[:count]])


def manifest_edited(data: bytes, rng: random.Random) -> bytes:
    """One leaf of the JSON has another value; the checksum stays."""
    body = json.loads(data)
    places = list(_leaves(body))
    holder, key = rng.choice(places)
    holder[key] = _edited(holder[key], rng)
    return (json.dumps(body, indent=1) + "\n").encode()


def index_edited(data: bytes, rng: random.Random) -> bytes:
    """One number of an index file is another; all checksums stay."""
    position = 8 * rng.randrange(len(data) // 8)
    [number] = WORD.unpack_from(data, position)
    other = (number + rng.choice([-1, 1, 8, 1 << 40])) % (1 << 64)
    return data[:position] + WORD.pack(other) + data[position + WORD.size :]


def _leaves(node: Any) -> Any:
    for key in node if isinstance(node, dict) else range(len(node)):
        if isinstance(node[key], dict | list) and node[key]:
            yield from _leaves(node[key])
        else:
            yield node, key


def _edited(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 8, 1 << 40])
    if isinstance(value, str) and value:
        position = rng.randrange(len(value))
        return value[:position] + chr(ord(value[position]) ^ 1) + value[position + 1 :]
    return "edited" if value is None or isinstance(value, str) else None


SINGLE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit flipped": flipped,
    "truncated": truncated,
    "bytes appended": appended,
    "manifest edited": manifest_edited,
    "index edited": index_edited,
}
_SHARES = {"bit flipped": 4, "truncated": 2, "bytes appended": 2, "manifest edited": 6, "index edited": 6}


def _fits(kind: str, name: str) -> bool:
    if kind == "manifest edited":
        return name == MANIFEST
    return kind != "index edited" or name.endswith(".index")


def matrix(names: list[str], count: int) -> list[Case]:
    """Every file missing, of another save, swapped with every other; the rest shared out over files and kinds."""
    found = [Case("missing", name, 0) for name in names]
    found += [Case("of another save", name, 0) for name in names]
    found += [Case("swapped", one, 0, other) for one, other in combinations(names, 2)]
    pairs = [
        (kind, name) for kind, share in _SHARES.items() for name in names if _fits(kind, name) for _ in range(share)
    ]
    return found + [Case(*pairs[i % len(pairs)], seed=i) for i in range(count - len(found))]


def changed(case: Case, files: Files, of_another_save: Files) -> Changed:
    """What the damage does; never nothing.

    Bytes of the manifest that say the same (white space at its end, `1E-05` for `1e-05`) are no damage to what the
    checkpoint says, and its checksum is over what it says: such a draw is drawn again.
    """
    if case.kind == "missing":
        return {case.name: None}
    if case.kind == "swapped":
        return {case.name: files[case.other], case.other: files[case.name]}
    if case.kind == "of another save":
        return {case.name: of_another_save[case.name]}
    rng = random.Random(f"{case.kind} {case.name} {case.seed}")
    while True:
        data = SINGLE[case.kind](files[case.name], rng)
        if data != files[case.name] and not (case.name == MANIFEST and says_the_same(data, files[MANIFEST])):
            return {case.name: data}


def says_the_same(data: bytes, before: bytes) -> bool:
    """Whether two texts are the same JSON."""
    try:
        return bool(json.loads(data) == json.loads(before))
    except (ValueError, RecursionError):
        return False


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative name."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def write(directory: Path, change: Changed) -> None:
    """Put contents in place of files."""
    for name, data in change.items():
        if data is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(data)


def save(directory: str, steps: int) -> dict[str, Any]:
    """On every rank: train and save, with files like those that Bridge adds; returns what was live."""
    trainable = cases.prepared(RECIPE, steps=steps)

    def add_files(staging: Path) -> None:
        (staging / "run_config.yaml").write_text("model:\n  layers: 1\n" + f"train:\n  steps: {steps}\n" * steps)
        (staging / "train_state.pt").write_bytes(random.Random(steps).randbytes(900 + steps))
        (staging / "tokenizer").mkdir()
        (staging / "tokenizer" / "tokenizer.json").write_text(json.dumps({"vocabulary": list(range(64 + steps))}))

    values = {
        "iteration": steps,
        "opt_param_scheduler": {"max_lr": 1e-5, "num_steps": steps},
        "more": {f"value {i}": i for i in range(steps)},
    }
    settings = mbridge_fsdp_ckpt.Settings(dcp_metadata="always")
    mbridge_fsdp_ckpt.save(
        directory,
        model=trainable.model,
        optimizer=trainable.optimizer,
        values=values,
        rank_values={"rng_state": {"(0, 0)": [{"seed": steps}]}},
        add_files=add_files,
        settings=settings,
    )
    return oracle.live(trainable)


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of a case: the error's name, or "missed: " and why."""

    case: Case
    outcome: str
    text: str


RIGHT = "what was saved was loaded"


@dataclass(slots=True)
class Trial:
    """A load of damaged copies, on every rank; rank 0 does and undoes the damage.

    Args:
        path: The checkpoint.
        may_be_unread: Index files that such a load does not need.
        live: What was saved.
    """

    path: Path
    may_be_unread: tuple[str, ...]
    live: dict[str, Any]
    trainable: Any = field(default_factory=lambda: cases.prepared(RECIPE, steps=1, seed=7))

    def tried(self, case: Case, pristine: Files, of_another_save: Files) -> Seen:
        """What a load of the damaged checkpoint does, and `verify`."""
        change = changed(case, pristine, of_another_save)
        before = oracle.live(self.trainable)
        self._write(change)
        outcome, text = self._attempt(set(change))
        after = oracle.live(self.trainable)
        if outcome == RIGHT:
            outcome = RIGHT if after == self.live else "missed: other tensors"
            self.trainable = cases.prepared(RECIPE, steps=1, seed=7)
        elif after != before and not outcome.startswith("missed"):
            outcome = "missed: live tensors changed"
        unseen = dist.get_rank() == 0 and not _found(self.path, set(change))
        self._write({name: pristine[name] for name in change})
        return Seen(case, "missed: verify" if unseen else outcome, text)

    def _write(self, change: Changed) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            write(self.path, change)
        dist.barrier()

    def _attempt(self, damaged: set[str]) -> tuple[str, str]:
        try:
            load(self.path, self.trainable)
        except CheckpointError as error:
            named = any(name.rpartition("/")[2] in str(error) for name in damaged)
            nameless = type(error).__name__ in ("RankFailedError", "InternalError", "LoadInterruptedError")
            outcome = "missed: not a named error" if nameless else type(error).__name__
            return (outcome if named else "missed: file not named"), str(error)
        except Exception as error:  # a missed case is a result here, and the test fails for it
            return "missed: another exception", f"{type(error).__name__}: {error}"
        return (RIGHT if damaged <= set(self.may_be_unread) else "missed: loaded"), ""


def load(path: Path, trainable: Any) -> None:
    """As a run does."""
    mbridge_fsdp_ckpt.load(str(path), model=trainable.model, optimizer=trainable.optimizer)


def _found(path: Path, damaged: set[str]) -> bool:
    """Whether `verify` names a damaged file, if only as what another one contradicts, or refuses to go on."""
    try:
        report = verify(path, header=False, workers=1, progress=Unwatched())
    except CheckpointError as error:
        return MANIFEST in damaged and str(path) in (error.key or "")
    return any(name == found.file or name in found.expected for found in report.damage for name in damaged)


def try_all(
    directory: str, other: str, to_try: list[Case], may_be_unread: tuple[str, ...], live: dict[str, Any]
) -> tuple[list[Seen], dict[str, Any]]:
    """On every rank: each damage, then the undamaged checkpoint; returns what was seen, and what is live at the end."""
    path = Path(directory)
    pristine, of_another_save = contents(path), contents(Path(other))
    trial = Trial(path, may_be_unread, live)
    found = [trial.tried(case, pristine, of_another_save) for case in to_try]
    assert contents(path) == pristine
    load(path, trial.trainable)
    return found, oracle.live(trial.trainable)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a save and a load take beside what the disk can do: `python -m benchmarks.disk`.

Two real ranks or four, models of few large tensors and of many small ones, each in one run: raw writes and reads of as
many bytes by as many processes, one file each, through the page cache and past it; saves and loads of ours, with every
byte hashed; and plain `torch.distributed.checkpoint` of the same tensors, which flushes, and hashes nothing; where it
is installed, `torch_checkpointing`, whose files are flushed for it.  All kinds take turns; whatever is written is
flushed, and nothing that is read is in the page cache.  The memory that a kind takes is memory that the machine has
(see `benchmarks.memory`).  Medians of the slowest rank.  What Megatron-FSDP does with loaded weights at the end of a
load, a gather of all of them, is told apart; and what a load takes that finds its memory taken: it reads into new
slots, so that one that fails leaves the old ones, where the others read into what is there.  For the same reason it
copies verified weights once more, into live memory: "but for gather and copy" is the load without that.  "But for
DCP metadata" is a save without the file that stock reads it by (`Settings.dcp_metadata`), which none of the others has.
"Not verified" is a load that checks structure and sizes alone (`Settings.verify`), and so reads weights into live
memory at once: no hash, no copy; with memory taken before, what is left of a load is the reading.

"Missed" names rows of ours that a peer is ahead of, and large models' that reach less than 85 % of the raw rate, each
with what it is without some of its costs; the phases below say where the time goes.

"Another layout" is a load from a checkpoint that as many ranks saved under tensor parallelism of two: every rank reads
parts of what others wrote.  That it brings every bit is checked before the first turn (see `benchmarks.layouts`).  The
others load DTensors of the same keys, saved as that tensor parallelism splits them, into FSDP2's layout: of some they
have nothing to reshard (see `benchmarks.resharded`).

Extra memory is that of the rank that took most, over its own before the call, at its peak in any turn; the allocator
keeps none of what was freed before.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import mbridge_fsdp_ckpt
from benchmarks import layouts, peers, plots
from benchmarks.harness import Numbers, in_turns, slowest, table, timed
from benchmarks.large import Compared, Expected, OfModels, untrained
from benchmarks.memory import Beforehand, Reserve, prepare_cache, trim
from benchmarks.resharded import Resharded
from mbridge_fsdp_ckpt.io.buffers import new_block
from testing.gpu.state import tensors
from testing.models import Recipe, Trainable

RAW = {
    "write": ("raw write, page cache", "raw write, direct"),
    "read": ("raw read, page cache", "raw read, direct"),
}
KINDS = (
    *RAW["write"],
    "save",
    "save but for DCP metadata",
    "save, DCP",
    *(("save, torch_checkpointing",) if peers.IS_INSTALLED else ()),
    *RAW["read"],
    "load",
    "load but for the gather",
    "load but for the gather, memory taken before",
    "load but for gather and copy",
    "load but for the gather, memory taken before, not verified",
    "load, another layout",
    "load but for the gather, another layout",
    "load but for gather and copy, another layout",
    "load, DCP",
    "load, another layout, DCP",
    *(("load, torch_checkpointing", "load, another layout, torch_checkpointing") if peers.IS_INSTALLED else ()),
    "memcpy",
)
PHASES = {
    "save": ("plan", "agree", "write", "flush", "compare", "index", "commit"),
    "load": ("open", "read", "agree", "fill", "refresh"),
}
"""The last one of a load is the gather."""

AFTER = PHASES["load"][-2:]
"""Those that begin when every byte is verified."""

WANTED = 0.85
"""Of the faster raw rate, where a model is large."""

_LARGE = 1.5e9  # bytes
_OURS = {
    "save": ("save but for DCP metadata",),
    "load but for the gather": (
        "load but for the gather, memory taken before",
        "load but for gather and copy",
        "load but for the gather, memory taken before, not verified",
    ),
    "load but for the gather, another layout": ("load but for gather and copy, another layout",),
}
"""Rows of ours, each with the same without some of its costs, in the order of what is left out."""

_BLOCK = 1 << 23


@dataclass(slots=True)
class Measured:
    """By one rank; one number a turn.

    Args:
        bytes: What it saves.
        seconds: By kind.
        extra: Bytes of memory, by kind.
    """

    bytes: int
    seconds: Numbers = field(default_factory=dict)
    extra: Numbers = field(default_factory=dict)


def measure(folder: str, recipe: Recipe, runs: int) -> dict[str, Any]:
    """On every rank: what it measured, but for the first turn."""
    trainable = untrained(recipe)
    trainable.step(0)
    layouts.check(folder, trainable)
    one = _Rank(Path(folder), trainable)
    turns = in_turns(lambda: ((name, (seconds, one.extra)) for name, seconds in one.turn()), runs)
    one.close()
    seconds, extra = ({name: [pair[number] for pair in pairs] for name, pairs in turns.items()} for number in (0, 1))
    return asdict(Measured(one.size, seconds, extra))


class _Rank:
    """One rank's measurements.

    Args:
        folder: Where the checkpoint of another layout is.
        trainable: What is saved.
    """

    def __init__(self, folder: Path, trainable: Trainable) -> None:
        self._elsewhere, self._folder, self._trainable = layouts.elsewhere(folder), folder / "own", trainable
        self._folder.mkdir(exist_ok=True)
        self._own = dict(tensors(trainable))
        self.size = sum(tensor.nbytes for tensor in self._own.values())
        self._source = torch.cat([t.reshape(-1).view(torch.uint8)[:_BLOCK] for t in self._own.values()])[:_BLOCK]
        self._resharded = Resharded(folder)
        self._expected, self._reserve = Expected(self.size), Reserve(2 * self.size)
        self.extra = 0.0
        """Bytes of this process's memory that the last kind took beyond what was there, at the most."""

    def turn(self) -> Iterator[tuple[str, float]]:
        """Each kind once."""
        whole: dict[str, Any] = {"model": self._trainable.model, "optimizer": self._trainable.optimizer}
        for name, direct in zip(RAW["write"], (False, True), strict=True):
            yield name, self._timed(partial(self._write, direct=direct))
        for name, direct in zip(RAW["read"], (False, True), strict=True):
            prepare_cache(self._folder, cached=False)
            yield name, self._timed(partial(self._read, direct=direct))
        self._clear()
        saved = self._folder / "saved"
        without = mbridge_fsdp_ckpt.Settings(dcp_metadata="never")
        alone = self._timed(lambda: mbridge_fsdp_ckpt.save(saved, settings=without, **whole))
        self._expected.check(saved)
        self._clear()
        told: list[Any] = []
        yield "save", self._timed(lambda: told.append(mbridge_fsdp_ckpt.save(saved, **whole)))
        yield from ((f"save: {phase}", told[0].seconds[phase]) for phase in PHASES["save"])
        self._expected.check(saved)
        yield "save but for DCP metadata", alone
        memory = Beforehand(self.size)
        with memory.seen():
            yield from self._load(saved, whole, "")
        with memory.taken():
            yield from self._load(saved, whole, ", memory taken before")
        with memory.taken():
            unverified = mbridge_fsdp_ckpt.Settings(verify="header")
            yield from self._load(saved, whole, ", memory taken before, not verified", unverified)
        yield from self._load(self._elsewhere, whole, ", another layout")
        self._clear()
        yield from self._plain()
        self._clear()
        yield from self._from_another_layout("DCP")
        if peers.IS_INSTALLED:
            yield from self._torch_checkpointing()
            self._clear()
            yield from self._from_another_layout("torch_checkpointing")
        yield "memcpy", self._timed(self._copy)

    def _load(
        self, saved: Path, whole: dict[str, Any], about: str, settings: mbridge_fsdp_ckpt.Settings | None = None
    ) -> Iterator[tuple[str, float]]:
        prepare_cache(saved, cached=False)
        loaded: list[mbridge_fsdp_ckpt.LoadResult] = []
        seconds = self._timed(lambda: loaded.append(mbridge_fsdp_ckpt.load(saved, settings=settings, **whole)))
        yield f"load{about}", seconds
        yield f"load but for the gather{about}", seconds - loaded[0].seconds["refresh"]
        yield f"load but for gather and copy{about}", seconds - sum(loaded[0].seconds[name] for name in AFTER)
        for phase in PHASES["load"]:
            yield f"load{about}: {phase}", loaded[0].seconds[phase]
        self._own = dict(tensors(self._trainable))  # the load has put new slots in place

    def _plain(self) -> Iterator[tuple[str, float]]:
        plain = self._folder / "plain"
        state = {f"{dist.get_rank()} {name}": tensor for name, tensor in self._own.items()}
        yield (
            "save, DCP",
            self._timed(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(plain, sync_files=True))),
        )
        self._expected.check(plain)
        prepare_cache(plain, cached=False)
        yield "load, DCP", self._timed(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(plain)))

    def _torch_checkpointing(self) -> Iterator[tuple[str, float]]:
        place = self._folder / "theirs"
        manager = peers.TorchCheckpointing(background=False)

        def save() -> None:
            manager.save(place, self._own)
            peers.flush(place)

        yield "save, torch_checkpointing", self._timed(save)
        self._expected.check(place)
        prepare_cache(place, cached=False)
        yield "load, torch_checkpointing", self._timed(lambda: manager.load(place, self._own))
        manager.close()

    def _from_another_layout(self, library: str) -> Iterator[tuple[str, float]]:
        targets = self._resharded.targets()
        prepare_cache(self._resharded.place(library), cached=False)
        yield f"load, another layout, {library}", self._timed(partial(self._resharded.load, library, targets))
        self._resharded.check(targets)

    def close(self) -> None:
        """Let what has been started end."""
        self._resharded.close()

    def _timed(self, action: Callable[[], object]) -> float:
        trim()
        dist.barrier()
        with self._reserve.free():
            Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
            before = _memory("VmRSS")
            seconds = timed(action)
            dist.barrier()
            self.extra = _memory("VmHWM") - before
        return seconds

    @property
    def _raw(self) -> Path:
        return self._folder / f"raw{dist.get_rank()}"

    def _write(self, *, direct: bool) -> None:
        file = os.open(self._raw, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | (os.O_DIRECT if direct else 0))
        block = new_block(_BLOCK)
        block[: self._source.nbytes] = self._source.numpy().tobytes()
        for start in range(0, self.size, _BLOCK):
            os.pwrite(file, memoryview(block)[: _in_sectors(self.size - start)], start)
        os.fsync(file)
        os.close(file)

    def _read(self, *, direct: bool) -> None:
        file = os.open(self._raw, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        block = new_block(_BLOCK)
        for start in range(0, self.size, _BLOCK):
            os.preadv(file, [memoryview(block)[: _in_sectors(self.size - start)]], start)
        os.close(file)

    def _copy(self) -> None:
        block = torch.empty(_BLOCK, dtype=torch.uint8)
        for tensor in self._own.values():
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _BLOCK):
                part = flat[start : start + _BLOCK]
                block[: part.numel()].copy_(part)

    def _clear(self) -> None:
        """Remove what was written: it is not to be flushed, or trimmed, while the next one is measured."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()


def _in_sectors(left: int) -> int:
    return min(_BLOCK, -(-left // mmap.PAGESIZE) * mmap.PAGESIZE)


def _memory(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(what))


def compare(ranks: list[dict[str, Any]]) -> Compared:
    """Medians of the slowest rank, and what they are of the faster raw rate; the most of any rank's extra memory."""
    seconds = slowest([rank["seconds"] for rank in ranks])
    size = sum(rank["bytes"] for rank in ranks)
    best = {what: min(seconds[name] for name in names) for what, names in RAW.items()}
    return {
        "bytes": size,
        "seconds": seconds,
        "gigabytes a second": {name: size / value / 1e9 for name, value in seconds.items()},
        "of raw": {
            name: best["write" if name.startswith("save") else "read"] / seconds[name]
            for name in KINDS
            if name.startswith(("save", "load"))
        },
        "extra memory": {name: max(max(rank["extra"][name]) for rank in ranks) for name in KINDS if _has_extra(name)},
    }


def _has_extra(name: str) -> bool:
    """Whether extra memory is told of it: not of a part of a load, nor where it was taken before."""
    return name.startswith(("save", "load")) and "but for" not in name


def section(one: Compared) -> list[str]:
    """One model on the page."""
    rows = []
    for name in KINDS:
        of_raw = f"{one['of raw'][name]:.0%}" if name in one["of raw"] else ""
        extra = f"{one['extra memory'][name] / 2**20:.0f}" if name in one["extra memory"] else ""
        rates = f"{one['seconds'][name]:.2f}", f"{one['gigabytes a second'][name]:.2f}"
        rows.append([name, *rates, of_raw, extra])
    head = ["", "s", "GB/s", "of the faster raw rate", "extra memory, MiB a rank"]
    lines = [f"{one['bytes'] / 1e9:.2f} GB in all.\n", *table(head, rows)]
    loads = "load", "load, memory taken before", "load, another layout"
    return [*lines, *_missed(one), *_phases(one, "save", ("save",)), *_phases(one, "load", loads)]


def _phases(one: Compared, kind: str, names: Sequence[str]) -> list[str]:
    """A table of the phases of some rows."""
    phases = PHASES[kind]
    rows = ([name, *(f"{one['seconds'][f'{name}: {phase}']:.3f}" for phase in phases)] for name in names)
    return ["", *table(["phases, in s", *phases], rows)]


def _missed(one: Compared) -> list[str]:
    """Rows of a model that are not what is wanted of them, as a list; nothing where nothing is missed."""
    found = [f"- {name}: {why}{_without(one, name)}." for name in _OURS if (why := ", ".join(_misses(one, name)))]
    return ["", "Missed:", "", *found] if found else []


def _misses(one: Compared, name: str) -> Iterator[str]:
    seconds = one["seconds"]
    if one["bytes"] > _LARGE and "another layout" not in name and one["of raw"][name] < WANTED:
        yield f"{one['of raw'][name]:.0%} of raw, {WANTED:.0%} wanted"
    peers = [f"{name.replace(' but for the gather', '')}, {peer}" for peer in ("DCP", "torch_checkpointing")]
    ahead = [f"{peer} {seconds[peer]:.2f} s" for peer in peers if seconds.get(peer, seconds[name]) < seconds[name]]
    if ahead:
        yield f"{seconds[name]:.2f} s, {' and '.join(ahead)}"


def _without(one: Compared, name: str) -> str:
    """The same row without some of its costs."""
    rates = [f"{one['seconds'][part]:.2f} s, {one['of raw'][part]:.0%} ({part})" for part in _OURS[name]]
    return f"; without some of its costs {'; '.join(rates)}"


BENCHMARK = OfModels(measure, compare, section, plots.disk, prepare=layouts.save_elsewhere).benchmark(
    "disk", "Saves and loads beside what the disk can do", __doc__
)

if __name__ == "__main__":
    BENCHMARK.main()

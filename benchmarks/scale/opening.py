# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What opening a checkpoint of many ranks costs one rank, and what committing it costs rank 0.

Synthetic checkpoints (`synthetic`): index and metadata as so many ranks write them, payload without content.
Each figure is of a process of its own, of its one call, without imports.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.scale.synthetic import FILES, SLOTS, STEP, Synthetic, result_of
from mbridge_fsdp_ckpt.commit.finishing import finish, metadata
from mbridge_fsdp_ckpt.commit.rename import RenameCommit
from mbridge_fsdp_ckpt.opening import open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import Box

RANKS = 64, 256, 1024, 4096, 16_384
CHUNKS = 1000, 10_000
DCP_RANKS = 64, 128, 256
Kind = Literal["same layout", "another layout", "commit"]
KINDS: tuple[Kind, ...] = ("same layout", "another layout", "commit")


@dataclass(frozen=True, slots=True)
class Opening:
    """One measurement.

    Args:
        ranks: That wrote the checkpoint.
        chunks: Of each rank.
        keys: Of the checkpoint.
        kind: What was done.
        found: Chunks that the rank found, or keys that rank 0 counted.
        cpu: Seconds of CPU, system calls included.
        seconds: In all.
        bytes_read: Of files.
        memory: Bytes by which the process grew, at its highest.
    """

    ranks: int
    chunks: int
    keys: int
    kind: Kind
    found: int
    cpu: float
    seconds: float
    bytes_read: int
    memory: int


def measure(folder: Path, ranks: int, chunks: int, repeats: int) -> list[Opening]:
    """Every kind, several times, each time in a process of its own; the median of each by CPU."""
    synthetic, directory = Synthetic.of(ranks, chunks), folder / f"iter_{ranks}x{chunks}"
    synthetic.write(directory, own=(ranks // 2, ranks * 3 // 8))
    found = []
    try:
        for kind in KINDS:
            runs = sorted(
                (_in_process(directory, ranks, chunks, kind) for _ in range(repeats)), key=lambda run: run.cpu
            )
            found.append(runs[len(runs) // 2])
    finally:
        shutil.rmtree(directory)
    return found


def _in_process(directory: Path, ranks: int, chunks: int, kind: Kind) -> Opening:
    command = [sys.executable, "-m", "benchmarks.scale.opening", str(directory), str(ranks), str(chunks), kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return Opening(**json.loads(done.stdout))


def _open(directory: Path, synthetic: Synthetic, *, same: bool) -> int:
    """What a load asks of its source, for a rank in the middle; how many chunks it found."""
    world = synthetic.ranks if same else synthetic.ranks * 3 // 4
    rank = world // 2
    held = synthetic.own(rank) if same else synthetic.resharded(rank, world)
    source = open_checkpoint(directory, near=[rank])
    needed: dict[str, list[Box]] = {}
    for parameter, box in held.items():
        weight = synthetic.key(parameter, "")
        assert source.metadata.keys[weight].shape
        slots = source.slots(synthetic.optimizer_name(parameter))
        assert slots.keys() == {*SLOTS[1:], STEP}
        needed[weight] = [box]
        needed |= {synthetic.key(parameter, s): [box if e.is_sharded else Box((), ())] for s, e in slots.items()}
    names = {synthetic.optimizer_name(parameter) for parameter in synthetic.model(rank)}
    assert source.hyperparameters(names).keys() == names
    own, _ = source.near({"rank": rank, "tensor": 0, "pipeline": 0, "data": rank})
    assert own is not None
    source.share(rank, world)
    return sum(map(len, source.chunks(list(needed), needed).values()))


def _commit(directory: Path, synthetic: Synthetic) -> int:
    """What rank 0 does of a commit but its own group's index: count, metadata, flush, rename."""
    result = result_of(directory)
    commit = RenameCommit(directory.with_name("iter_0000001"))
    (directory / "manifest.json").rename(directory.with_name("manifest.json"))
    commit.directory.rmdir()
    directory.rename(commit.directory)
    manifest = metadata(writer={}, topology={"world": synthetic.ranks}, sections=("model", "optimizer"), files=FILES,
                    result=result, directory=commit.directory, values={})  # fmt: skip
    finish(commit, manifest, view_of=None, add_files=None)
    directory.with_name("iter_0000001").rename(directory)
    return manifest.keys


def _main() -> None:
    directory, ranks, chunks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    kind = next(known for known in KINDS if known == sys.argv[4])
    synthetic = Synthetic.of(ranks, chunks)
    actions: dict[Kind, Callable[[], int]] = {
        "same layout": lambda: _open(directory, synthetic, same=True),
        "another layout": lambda: _open(directory, synthetic, same=False),
        "commit": lambda: _commit(directory, synthetic),
    }
    read, cpu, begin, memory = _bytes_read(), time.process_time(), time.perf_counter(), _peak()
    found = actions[kind]()
    measured = Opening(
        ranks=ranks,
        chunks=chunks,
        keys=synthetic.keys,
        kind=kind,
        found=found,
        cpu=time.process_time() - cpu,
        seconds=time.perf_counter() - begin,
        bytes_read=_bytes_read() - read,
        memory=_peak() - memory,
    )
    print(json.dumps(asdict(measured)))


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _peak() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    _main()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What DCP metadata costs rank 0 at a commit: `python -m benchmarks.stock_view`.

Index files of many ranks, made up, and the real `write_dcp_view` over them in a process of its own: seconds, bytes of
`.metadata`, and the memory it takes; and the seconds of the next save of the same training, of which rank 0 has kept
`.metadata` unless that is large.  This is what the limit of `dcp_metadata="auto"` goes by.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from benchmarks.harness import Benchmark, Found, Say, positive, table
from mbridge_fsdp_ckpt.dcp.writer import write_dcp_view
from mbridge_fsdp_ckpt.format.columns import Columns
from mbridge_fsdp_ckpt.format.group_index import merged
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex, own_index
from mbridge_fsdp_ckpt.format.reader import SafeSource
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.schema import VERSION, IndexEntry, Manifest
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.settings import AUTO_DCP_CHUNKS

FILES = Files("0123456789ab")
CHUNKS_A_RANK = 1_000
RANKS = (8, 64, 512, 2_048)
Figures = dict[str, float]


def measure(ranks: int) -> Figures:
    """Write the view of the index of `ranks` ranks; each holds a block of rows of every key."""
    keys = {f"model.layers.{n}.weight": KeyEntry(dtype="float32", shape=(ranks, 8)) for n in range(CHUNKS_A_RANK)}
    with tempfile.TemporaryDirectory() as folder:
        source = SafeSource(
            Path(folder), manifest=_head(Path(folder), [_own(Path(folder), r, keys) for r in range(ranks)])
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, seconds_again = (_seconds(Path(folder), source, iteration) for iteration in (1, 2))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        size = (Path(folder) / "1" / ".metadata").stat().st_size
    return {
        "ranks": ranks,
        "chunks": ranks * CHUNKS_A_RANK,
        "seconds": seconds,
        "seconds again": seconds_again,
        "bytes": size,
        "memory": memory * 1024,
    }


def _seconds(folder: Path, source: SafeSource, iteration: int) -> float:
    """To write the view, into a folder of its own; the index is read for each."""
    target = folder / str(iteration)
    target.mkdir()
    begin = time.perf_counter()
    write_dcp_view(target, SafeSource(folder, manifest=source.manifest), {"iteration": iteration})
    return time.perf_counter() - begin


def _own(folder: Path, rank: int, keys: dict[str, KeyEntry]) -> Columns:
    chunks = [Chunk(key, Box((rank, 0), (1, 8)), ByteRange(1000 * n, 1000), 0, 32, 0) for n, key in enumerate(keys)]
    file = FileEntry(name=FILES.payload(rank), size=1000 * len(chunks), checksum="xxh3_64:0")
    own = own_index(RankIndex(rank, {"rank": rank}, file, keys), chunks, FILES)
    (folder / FILES.of_rank(rank)).write_bytes(own.to_bytes())
    return own


def _head(folder: Path, parts: list[Columns]) -> Manifest:
    """The metadata over one group of all ranks."""
    data, name = merged(parts).to_bytes(), FILES.of_group(0)
    (folder / name).write_bytes(data)
    return Manifest(
        format=FORMAT_NAME,
        version=VERSION,
        save=FILES.save,
        writer={},
        topology={"world": len(parts)},
        sections=("model",),
        keys=CHUNKS_A_RANK,
        chunks=CHUNKS_A_RANK * len(parts),
        index=(IndexEntry(name=name, size=len(data), checksum="", rank=0),),
        values=None,
    )


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    figures: list[Figures] = []
    for ranks in arguments.ranks:
        say(f"{ranks} ranks")
        with get_context("spawn").Pool(1) as pool:  # the memory of one is not another's
            runs = [pool.apply(measure, (ranks,)) for _ in range(arguments.repeats)]
        figures.append({name: statistics.median(run[name] for run in runs) for name in runs[0]})
        yield {"figures": figures}


def _body(found: Found) -> list[str]:
    rows = (
        [
            f"{row['ranks']:.0f}",
            f"{row['chunks']:.0f}",
            f"{row['seconds']:.1f}",
            f"{row['seconds again']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['memory'] / 1e6:.0f}",
        ]
        for row in found["figures"]
    )
    head = ["ranks", "chunks", "seconds", "seconds, next save", ".metadata, MB", "memory, MB"]
    limit = f"{CHUNKS_A_RANK} chunks a rank; `auto` writes the view up to {AUTO_DCP_CHUNKS} chunks.\n"
    return [limit, *table(head, rows)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS, help="sizes of the job")


BENCHMARK = Benchmark(
    command="python -m benchmarks.stock_view",
    name="stock_view",
    title="What DCP metadata costs rank 0 at a commit",
    about=__doc__,
    measure=_measure,
    body=_body,
    options=_options,
    repeats=1,
)

if __name__ == "__main__":
    BENCHMARK.main()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What planning a save costs one rank of a large model: the first time, and later.

Ranks of Qwen3.5-397B with FusedAdam, tensors without memory (`mbridge_fsdp_ckpt estimate`); what is measured is the
function that a save calls.  Each rank is a process of its own, forked from one that has built the model.  Garbage is
collected before, as it is in a job that has trained.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.harness import Benchmark, Found, Say, positive, table
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import tensors_of
from mbridge_fsdp_ckpt.saving.snapshot import observe, plan_save
from mbridge_fsdp_ckpt.tools.estimate.job import describe
from mbridge_fsdp_ckpt.tools.estimate.model import EstimatedModel, Subject, as_rank

MODEL = "recipes.qwen:qwen35_397b_a17b_pretrain"
RANKS = 8, 512, 8960
SHARES = 8
MOST_EXPERTS = 64


@dataclass(frozen=True, slots=True)
class Planning:
    """One rank's.

    Args:
        ranks: Of the job.
        expert: Its expert-parallel size.
        rank: The rank.
        parameters: Parameters and buffers of its model.
        blocks: What it holds of these and of their optimizer's state.
        first: CPU seconds of the first save's planning.
        later: CPU seconds of a later one: the median of several.
        seconds: Wall-clock seconds of both.
    """

    ranks: int
    expert: int
    rank: int
    parameters: int
    blocks: int
    first: float
    later: float
    seconds: tuple[float, float]


def measure(ranks: int, repeats: int) -> list[Planning]:
    """Ranks that are spread over a job; each plans once, and then so many times more."""
    command = [sys.executable, "-m", "benchmarks.scale.planning", str(ranks), str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return [Planning(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def _measure(ranks: int, repeats: int) -> list[Planning]:
    expert = min(ranks, MOST_EXPERTS)
    chosen = {"world": ranks, "tensor": 2, "context": 1, "expert": expert}
    job = describe(MODEL, chosen, {}).job()
    with as_rank(job.layout, 0):
        subject = job.subject()

    found = []
    gc.collect()
    gc.freeze()
    for share in range(min(SHARES, ranks)):
        rank = share * (ranks - 1) // (min(SHARES, ranks) - 1)
        ours, theirs = multiprocessing.Pipe()
        forked = multiprocessing.get_context("fork").Process(target=_in_process, args=(theirs, subject, rank, repeats))
        forked.start()
        theirs.close()
        found.append(ours.recv())
        forked.join()
    return found


def _in_process(parent: Connection, subject: Subject, rank: int, repeats: int) -> None:
    with as_rank(subject.layout, rank):
        parent.send(_planned(subject, rank, repeats))


def _planned(subject: Subject, rank: int, repeats: int) -> Planning:
    model = EstimatedModel(subject)
    optimizer = model.optimizer()
    gc.collect()
    cpu, wall, blocks = [], [], 0
    for _ in range(1 + repeats):
        start, begin = time.process_time(), time.perf_counter()
        blocks = len(plan_save(observe(model, optimizer, None, None, None, subject.vocabulary_size)).shards)
        cpu.append(time.process_time() - start)
        wall.append(time.perf_counter() - begin)
    layout = subject.layout
    seconds = wall[0], median(wall[1:])
    count = len(tensors_of(model))
    return Planning(layout.world, layout.expert, rank, count, blocks, cpu[0], median(cpu[1:]), seconds)


def _body(found: Found) -> list[str]:
    """Medians and worst of each job."""
    measured: list[Planning] = found["measured"]
    rows = []
    for ranks in sorted({one.ranks for one in measured}):
        those = [one for one in measured if one.ranks == ranks]
        blocks = sorted(one.blocks for one in those)
        held = f"{those[0].parameters:,}", f"{blocks[0]:,} to {blocks[-1]:,}"
        seconds = [[one.first for one in those], [one.later for one in those]]
        figures = [f"{figure:.3f}" for each in seconds for figure in (median(each), max(each))]
        rows.append([f"{ranks:,}", str(those[0].expert), str(len(those)), *held, *figures])
    head = ["ranks", "EP", "measured", "tensors of a rank", "blocks it holds"]
    about = "TP 2; CPU seconds, median and most of the job's measured ranks. Wall-clock seconds are in the JSON file.\n"
    return [about, *table([*head, "first save, s", "most", "later, s", "most"], rows)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS, help="sizes of the job")


def _all(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    found: list[Planning] = []
    for ranks in arguments.ranks:
        found += measure(ranks, arguments.repeats)
        say(f"{ranks} ranks: {len(found)} ranks planned")
        yield {"measured": found}


BENCHMARK = Benchmark(
    command="python -m benchmarks.scale planning",
    name="scale_planning",
    title="Planning a save",
    about=__doc__,
    measure=_all,
    body=_body,
    options=_options,
    repeats=9,
)

if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in _measure(int(sys.argv[1]), int(sys.argv[2]))]))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Saves and loads of a model of many small tensors on real ranks: this checkout beside another one.

Each checkout has processes of its own, which run its own copy of this file, one after the other and again; of each run
the first save and load are left out.
Seconds are those of the slowest rank, medians over the repeats of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Benchmark, Found, Numbers, Say, in_turns, positive, ranks_of, slowest_turns, table, timed
from testing.machine import output

_HERE = Path(__file__).parents[2]
EXPERTS = 32


def on_rank(directory: str, layers: int, repeats: int) -> Numbers:
    """What each rank does: seconds of its saves and loads."""
    import mbridge_fsdp_ckpt
    from mbridge_fsdp_ckpt.upstream_fixes import corrections
    from testing.kernels import replace_cuda_only_kernels
    from testing.models import Recipe, build

    replace_cuda_only_kernels()
    corrections.apply(__name__)
    _wrap_in_linear_time()
    trainable = build(Recipe(layers=layers, experts=EXPERTS, hidden=16, ffn=16))
    trainable.step(0)
    settings: Any = mbridge_fsdp_ckpt.Settings(dcp_metadata="never")
    arguments = {"model": trainable.model, "optimizer": trainable.optimizer, "settings": settings}

    def turn() -> Iterator[tuple[str, float]]:
        yield "save", timed(lambda: mbridge_fsdp_ckpt.save(directory, **arguments))
        yield "load", timed(lambda: mbridge_fsdp_ckpt.load(directory, **arguments))

    return in_turns(turn, repeats)


def _wrap_in_linear_time() -> None:
    """Megatron-FSDP (Core 0.19) walks through all modules for each of them: half an hour of 10,000; here once."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp as upstream
    from torch.nn import Module

    inside: dict[Module, set[Module]] = {}
    known: dict[tuple[Module, bool], list[Any]] = {}
    register, parameters = upstream.MegatronFSDP._register_fsdp_hooks, Module.parameters

    def is_submodule(module: Module, parent: Module) -> bool:
        if parent not in inside:
            inside[parent] = set(parent.modules()) - {parent}
        return module in inside[parent]

    def remembered(module: Module, recurse: bool = True) -> list[Any]:
        if (module, recurse) not in known:
            known[module, recurse] = list(parameters(module, recurse))
        return known[module, recurse]

    def register_hooks(wrapper: Any, root: Module) -> None:
        with patch.object(Module, "parameters", remembered), patch.object(upstream, "is_submodule", is_submodule):
            register(wrapper, root)

    upstream.MegatronFSDP._register_fsdp_hooks = register_hooks


def _run(ranks: int, layers: int, repeats: int) -> None:
    """In a process of one checkout: the slowest rank of each save and load, and how many chunks there are."""
    from mbridge_fsdp_ckpt.opening import open_checkpoint

    module = __import__("chunks")  # what ranks import
    with ranks_of(ranks, None, preload=()) as (pool, folder):
        directory = folder / "iter_0000001"
        found = pool.run(module.on_rank, str(directory), layers, repeats)
        source = open_checkpoint(directory)
        chunks = sum(map(len, source.chunks(list(source.metadata.keys)).values()))
    print(json.dumps({"chunks": chunks, **slowest_turns(found)}))


def measure(against: Path, layers: int, ranks: int, runs: int, repeats: int) -> dict[str, Any]:
    """Medians of both, for a model of so many layers."""
    seen: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
    for _ in range(runs):
        for side, checkout in (("other", against), ("this", _HERE)):
            seen[side].append(_in_checkout(checkout, ranks, layers, repeats))
    row: dict[str, Any] = {"layers": layers, "ranks": ranks, "chunks": seen["this"][0]["chunks"]}
    for what in ("save", "load"):
        for side, found in seen.items():
            seconds = [second for one in found for second in one[what]]
            row[f"{what}, {side}"] = statistics.median(seconds)
            row[f"{what}, {side}, each"] = [round(second, 3) for second in seconds]
    return row


def _in_checkout(checkout: Path, ranks: int, layers: int, repeats: int) -> dict[str, Any]:
    own = checkout / "benchmarks" / "scale"
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{own}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "chunks", str(ranks), str(layers), str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=checkout, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _body(found: Found) -> list[str]:
    rows = (
        [f"{row['chunks']:,}", str(row["ranks"]), what, f"{other:.3f}", f"{this:.3f}", f"{this / other:.2f}"]
        for row in found["rows"]
        for what, other, this in ((what, row[f"{what}, other"], row[f"{what}, this"]) for what in ("save", "load"))
    )
    head = ["chunks", "ranks", "", "other, s", "this, s", "this / other"]
    return [f"The other checkout: {found['other']}.\n", *table(head, rows)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, required=True, help="root of the other checkout")
    parser.add_argument("--layers", type=positive, nargs="+", default=[9, 93], help="of the models (default: 9 93)")
    parser.add_argument("--ranks", type=positive, default=4, help="real ranks (default: 4)")
    parser.add_argument("--runs", type=positive, default=3, help="runs of each checkout, in turn (default: 3)")


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    against, rows = arguments.against.resolve(), []
    other = output(["git", "-C", str(against), "rev-parse", "HEAD"])
    for layers in arguments.layers:
        say(f"{layers} layers")
        rows.append(measure(against, layers, arguments.ranks, arguments.runs, arguments.repeats))
        yield {"other": other, "rows": rows}


BENCHMARK = Benchmark(
    command="python -m benchmarks.scale chunks",
    name="scale_chunks",
    title="Many small tensors",
    about=__doc__,
    measure=_measure,
    body=_body,
    options=_options,
)

if __name__ == "__main__":
    _run(*map(int, sys.argv[1:4]))

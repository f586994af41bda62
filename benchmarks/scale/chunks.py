# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Saves and loads of a model of many small tensors on real ranks: this checkout beside another one.

Each checkout has processes of its own, which run its own copy of this file, one after the other and again; of each run
the first save and load are left out.
Seconds are those of the slowest rank, medians over the repeats of all runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

_HERE = Path(__file__).parents[2]
EXPERTS = 32

Times = dict[str, list[float]]


def on_rank(directory: str, layers: int, repeats: int) -> Times:
    """What each rank does: seconds of its saves and loads."""
    import torch.distributed as dist

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
    times: Times = {"save": [], "load": []}
    for number in range(repeats + 1):
        for what, action in (("save", mbridge_fsdp_ckpt.save), ("load", mbridge_fsdp_ckpt.load)):
            dist.barrier()
            begin = time.perf_counter()
            action(directory, **arguments)
            if number:
                times[what].append(time.perf_counter() - begin)
    return times


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
    from testing.ranks import RankPool

    module = __import__("chunks")  # what ranks import
    with tempfile.TemporaryDirectory() as folder, RankPool(ranks, time_limit=3000.0, nan_memory=False) as pool:
        directory = Path(folder) / "iter_0000001"
        found = pool.run(module.on_rank, str(directory), layers, repeats)
        source = open_checkpoint(directory)
        chunks = sum(map(len, source.chunks(list(source.metadata.keys)).values()))
    slowest = {what: list(map(max, zip(*(rank[what] for rank in found), strict=True))) for what in found[0]}
    print(json.dumps({"chunks": chunks, **slowest}))


def measure(against: Path, layers: Sequence[int], ranks: int, runs: int, repeats: int) -> list[dict[str, Any]]:
    """Medians of both, for models of so many layers."""
    rows = []
    for number in layers:
        seen: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
        for _ in range(runs):
            for side, checkout in (("other", against), ("this", _HERE)):
                seen[side].append(_in_checkout(checkout, ranks, number, repeats))
        row: dict[str, Any] = {"layers": number, "ranks": ranks, "chunks": seen["this"][0]["chunks"]}
        for what in ("save", "load"):
            for side, found in seen.items():
                seconds = [second for one in found for second in one[what]]
                row[f"{what}, {side}"] = statistics.median(seconds)
                row[f"{what}, {side}, each"] = [round(second, 3) for second in seconds]
        rows.append(row)
    return rows


def _in_checkout(checkout: Path, ranks: int, layers: int, repeats: int) -> dict[str, Any]:
    own = checkout / "benchmarks" / "scale"
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{own}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "chunks", str(ranks), str(layers), str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=checkout, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(about: dict[str, str], against: str, rows: Sequence[dict[str, Any]]) -> str:
    """Everything, as Markdown."""
    lines = [f"# Many small tensors\n\n{(__doc__ or '').strip()}\n"]
    lines += [f"- {name}: {value}" for name, value in {**about, "the other checkout": against}.items()]
    lines += [
        "\n| chunks | ranks | | other, s | this, s | this / other |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        for what in ("save", "load"):
            other, this = row[f"{what}, other"], row[f"{what}, this"]
            lines.append(
                f"| {row['chunks']:,} | {row['ranks']} | {what} | {other:.3f} | {this:.3f} | {this / other:.2f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _run(*map(int, sys.argv[1:4]))

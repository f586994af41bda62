# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Stock `fsdp_dtensor` and `fsdp_dtensor_safe`, side by side: `python -m benchmarks`.

Real `pretrain()` on CPU ranks in each format, with saves that training waits for and saves that go on asynchronously;
Bridge's other ways to save beside them.  All take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.cases import LARGE, Suite, many, run_suite
from benchmarks.harness import Benchmark, Found, Say, positive
from benchmarks.report import body, draw
from testing.models import Recipe


def _options(parser: argparse.ArgumentParser) -> None:
    sizes = f"of the sides: experts x layers, such as 128x12 (default: 64x4), or large tensors: {', '.join(LARGE)}"
    parser.add_argument("--size", type=_size, metavar="SIZE", help=sizes)


def _size(text: str) -> Recipe:
    if text in LARGE:
        return LARGE[text]
    try:
        experts, layers = text.split("x")
        return many(positive(experts), positive(layers))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is neither experts x layers nor one of {', '.join(LARGE)}") from None


def _suffix(arguments: argparse.Namespace) -> str:
    """Of the results of few large tensors."""
    return "".join(f"_{name.replace(' ', '_')}" for name, size in LARGE.items() if size == arguments.size)


def _measure(arguments: argparse.Namespace, say: Say) -> Iterator[Found]:
    suite = Suite.of(arguments.repeats, quick=arguments.quick, size=arguments.size)
    yield {"cases": run_suite(suite, arguments.scratch, say)}


BENCHMARK = Benchmark(
    command="python -m benchmarks",
    name="stock_and_safe",
    title="Stock `fsdp_dtensor` and `fsdp_dtensor_safe`, side by side",
    about=__doc__,
    measure=_measure,
    body=body,
    draw=draw,
    options=_options,
    suffix=_suffix,
    repeats=3,
    quick=True,
)

if __name__ == "__main__":
    BENCHMARK.main()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`convert`, on disk: `reshard`, `to-stock`, `from-stock`, `from-torch-dist`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mbridge_fsdp_ckpt.io.progress_bar import progress_bar
from mbridge_fsdp_ckpt.tools.command.console import AsJson, print_facts, print_json, say, size_text

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.tools.convert.job import Report

Source = Annotated[str, typer.Argument(help="An iteration directory, or the root of a run's checkpoints; path or URL.")]
Destination = Annotated[
    str, typer.Argument(help="The iteration directory to be made, such as new/iter_0000010; it must not exist yet.")
]


def from_stock(source: Source, destination: Destination, as_json: AsJson = False) -> None:
    """Convert a checkpoint that Bridge wrote alone (fsdp_dtensor) into fsdp_dtensor_safe.

    Every block stays with the rank that wrote it. Training goes on from the result as it would from the original.
    """
    from mbridge_fsdp_ckpt.tools.convert import on_disk

    with progress_bar() as bar:
        report = on_disk.from_stock(source, destination, bar)
    _show(report, as_json)


def from_torch_dist(
    source: Source,
    destination: Destination,
    trust_run_config: Annotated[
        bool,
        typer.Option(
            "--trust-run-config",
            help="Let Bridge call the functions that the checkpoint's run configuration names, which can be any code. "
            "Required if there is one.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert Megatron's torch_dist checkpoint, which Bridge or Megatron-LM wrote, into fsdp_dtensor_safe.

    The model is built from the checkpoint's run_config.yaml, or Megatron-LM's arguments where there is none, in one
    process, without a GPU or memory for its weights.
    Optimizer state comes along where it was saved by parameter (dist_ckpt_optim_fully_reshardable=True).
    """
    from mbridge_fsdp_ckpt.tools.convert import on_disk

    with progress_bar() as bar:
        report = on_disk.from_torch_dist(source, destination, bar, trust_run_config=trust_run_config)
    _show(report, as_json)


def reshard(
    source: Source,
    destination: Destination,
    ranks: Annotated[int, typer.Option(min=1, help="How many payload files there are to be.")],
    merge_ranks: Annotated[
        bool,
        typer.Option(
            "--merge-ranks",
            help="Keep the random-number states of one rank for each (pipeline, tensor) place, as stock does, "
            "instead of a small index file for every rank that saved.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint as if so many ranks had saved it: few large files out of many, or the reverse.

    Every tensor is split evenly along its first dimension. Reads both formats, writes fsdp_dtensor_safe.
    """
    from mbridge_fsdp_ckpt.tools.convert import on_disk

    with progress_bar() as bar:
        report = on_disk.reshard(source, destination, bar, ranks=ranks, merge_ranks=merge_ranks)
    _show(report, as_json)


def to_stock(source: Source, destination: Destination, as_json: AsJson = False) -> None:
    """Convert a checkpoint into fsdp_dtensor, which Bridge loads without this package.

    Notes name what stock has no place for. What is read is verified; stock itself has no checksums.
    """
    from mbridge_fsdp_ckpt.tools.convert import on_disk

    with progress_bar() as bar:
        report = on_disk.to_stock(source, destination, bar)
    _show(report, as_json)


def _show(report: Report, as_json: bool) -> None:
    """Say what was done."""
    if as_json:
        print_json(asdict(report))
        return
    say(report.destination, style="bold")
    files = f"{report.files} file" + ("" if report.files == 1 else "s")
    print_facts(
        [
            ("format", report.written),
            ("from", f"{report.source} ({report.read})"),
            ("holds", f"{report.keys} keys, {size_text(report.bytes)} in {files}"),
            ("resume with", report.resume),
        ]
    )
    for note in report.notes:
        say(f"Note: {note}.")

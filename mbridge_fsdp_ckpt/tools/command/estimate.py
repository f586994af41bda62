# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`estimate`: what a save of a job would write, before there is a job."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.tools.command.console import (
    EXIT_CODES,
    AsJson,
    app,
    be_quiet,
    fail,
    print_facts,
    print_json,
    print_table,
    say,
    size_text,
)

if TYPE_CHECKING:
    from mbridge_fsdp_ckpt.tools.estimate.costs import Bandwidths, Prediction
    from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate
    from mbridge_fsdp_ckpt.tools.estimate.job import Chosen


class StrategyName(StrEnum):
    """Names of `--strategy`."""

    no_shard = "no_shard"
    optim = "optim"
    optim_grads = "optim_grads"
    optim_grads_params = "optim_grads_params"


class OuterName(StrEnum):
    """Names of `--outer-strategy`."""

    no_shard = "no_shard"
    optim = "optim"


class OptimizerName(StrEnum):
    """Names of `--optimizer`."""

    fused = "fused"
    torch = "torch"
    none = "none"


class DtypeName(StrEnum):
    """Names of `--main-weights` and `--moments`."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def _size(text: str) -> Any:
    return typer.Option(min=1, show_default=False, help=text)


def _rate(text: str) -> Any:
    return typer.Option(min=1e-3, metavar="GB/S", help=text)


Model = Annotated[str, typer.Argument(help="A Hugging Face config.json, its directory, or MODULE:FUNCTION.")]
World = Annotated[int | None, _size("Ranks, up to 16,384.")]
Tp = Annotated[int | None, _size("Tensor-parallel size. Here and below: by default the configuration's, or 1.")]
Pp = Annotated[int | None, _size("Pipeline stages; released Megatron-FSDP refuses more than one.")]
Cp = Annotated[int | None, _size("Context-parallel size.")]
Ep = Annotated[int | None, _size("Expert-parallel size.")]
Etp = Annotated[int | None, _size("Tensor-parallel size of experts.")]
OuterSize = Annotated[int | None, _size("Size of the outer dimension of hybrid sharding.")]
OuterStrategy = Annotated[OuterName | None, typer.Option(help="What is sharded over that outer dimension.")]
Strategy = Annotated[StrategyName | None, typer.Option(help="What is sharded over data-parallel ranks.")]
Optimizer = Annotated[OptimizerName | None, typer.Option(help="Transformer Engine's FusedAdam, torch's AdamW, none.")]
MainWeights = Annotated[DtypeName | None, typer.Option(help="Main weights: float32, or the model's own.")]
Moments = Annotated[DtypeName | None, typer.Option(help="FusedAdam's moments.")]
Offload = Annotated[
    float | None, typer.Option(min=0, max=1, help="The fraction of the optimizer that is offloaded to the host.")
]
To = Annotated[str | None, typer.Option(metavar="SIZES", help="Load in another layout: world=64,tp=2,ep=8.")]
RanksPerHost = Annotated[int, typer.Option(min=1, help="Ranks of a host.")]
HostWrite = Annotated[float, _rate("What a host writes. All rates are assumptions: measure yours.")]
HostRead = Annotated[float, _rate("What a host reads.")]
StorageWrite = Annotated[float, _rate("What the storage takes from all hosts together.")]
StorageRead = Annotated[float, _rate("What the storage gives to all hosts together.")]
Picture = Annotated[str | None, typer.Option(metavar="FILE", help="Draw who writes what: .png, .svg (matplotlib).")]


@app.command(epilog=EXIT_CODES)
def estimate(
    model: Model,
    world: World = None,
    tp: Tp = None,
    pp: Pp = None,
    cp: Cp = None,
    ep: Ep = None,
    etp: Etp = None,
    outer: OuterSize = None,
    outer_strategy: OuterStrategy = None,
    strategy: Strategy = None,
    optimizer: Optimizer = None,
    main_weights: MainWeights = None,
    moments: Moments = None,
    offload: Offload = None,
    to: To = None,
    ranks_per_host: RanksPerHost = 8,
    host_write: HostWrite = 5.0,
    host_read: HostRead = 10.0,
    storage_write: StorageWrite = 200.0,
    storage_read: StorageRead = 400.0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Show what each rank of a job would save, and how long that takes: no weights, no GPU, no ranks.

    The model is planned over tensors without memory, by the functions that a save calls.
    """
    be_quiet()
    sys.path.insert(0, str(Path.cwd()))  # MODULE may be the user's own
    from mbridge_fsdp_ckpt.tools.estimate.costs import Bandwidths
    from mbridge_fsdp_ckpt.tools.estimate.job import chosen_kept, chosen_layout

    layout = chosen_layout(
        {"world": world, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "outer": outer}, outer_strategy, strategy
    )
    kept = chosen_kept(optimizer, main_weights, moments, offload)
    rates = Bandwidths(host_write, host_read, storage_write, storage_read, ranks_per_host)
    try:
        _conclude(_answer(model, layout, kept, to, rates, picture), picture, as_json=as_json)
    except ConfigurationError as error:
        fail(error, 2)


def _check_picture(picture: str | None) -> None:
    from mbridge_fsdp_ckpt.tools.estimate.picture import require_matplotlib

    if picture is None:
        return
    if not picture.endswith((".png", ".svg")):
        raise ConfigurationError(
            expected="--picture FILE.png or FILE.svg", found=repr(picture), remedy="Give the file such a name."
        )
    require_matplotlib()


class _Answer(NamedTuple):
    found: Estimate
    prediction: Prediction


def _answer(
    model: str, layout: Chosen, kept: Chosen, to: str | None, rates: Bandwidths, picture: str | None
) -> _Answer:
    """Estimate; all that is wrong with the arguments is said before the minute that it takes."""
    from mbridge_fsdp_ckpt.tools.estimate.costs import predict
    from mbridge_fsdp_ckpt.tools.estimate.estimate import estimate as estimated
    from mbridge_fsdp_ckpt.tools.estimate.job import describe, sizes_of

    _check_picture(picture)
    layouts = [layout] if to is None else [layout, layout | sizes_of(to)]
    jobs = [describe(model, each, kept).job() for each in layouts]
    found, *others = map(estimated, jobs)
    return _Answer(found, predict(found, rates, others[0] if others else None))


def _conclude(answer: _Answer, picture: str | None, *, as_json: bool) -> None:
    found, prediction = answer
    written = []
    if picture is not None:
        from mbridge_fsdp_ckpt.io.files import replace_file
        from mbridge_fsdp_ckpt.io.store import as_path
        from mbridge_fsdp_ckpt.tools.estimate.picture import draw

        replace_file(as_path(picture), draw(found, picture.rpartition(".")[2]))
        written.append(picture)
    if as_json:
        print_json(_as_data(found, prediction) | {"written": written})
    else:
        _show(found, prediction)
        for path in written:
            say(f"Wrote {path}")


def _as_data(found: Estimate, prediction: Prediction) -> dict[str, Any]:
    from mbridge_fsdp_ckpt.tools.estimate.counted import METRICS

    tally, elsewhere, rates = found.tally, prediction.elsewhere, prediction.rates
    ranks = {name: getattr(tally, name).tolist() for name in METRICS}
    return {
        "model": found.name,
        "layout": asdict(found.layout),
        "total": {name: sum(numbers) for name, numbers in ranks.items()},
        "max_over_mean": round(found.balance.ratio, 4),
        "files": prediction.files,
        "index_bytes": prediction.index.total,
        "requests": prediction.requests,
        "bytes_by_part": {part: int(sizes.sum()) for part, sizes in tally.by_part.items()},
        "ranks": ranks,
        "planned_ranks": sorted(found.plans),
        "seconds": {
            "estimate": found.seconds,
            "planning": found.planning[0],
            "planning_later": found.planning[1],
            "save": prediction.save,
            "later_save": prediction.later_save,
            "load": prediction.load,
        },
        "elsewhere": elsewhere
        and {
            "layout": asdict(elsewhere.layout),
            "read_over_held": elsewhere.read_over_held,
            "seconds": elsewhere.seconds,
        },
        "rates_gb_s": {name: getattr(rates, name) for name in _RATES} | {"ranks_per_host": rates.ranks},
    }


_RATES = ("host_write", "host_read", "storage_write", "storage_read")


def _show(found: Estimate, prediction: Prediction) -> None:
    tally, rates = found.tally, prediction.rates
    total = size_text(int(tally.bytes.sum()))
    say(found.name, style="bold")
    planned = ", ".join(str(rank) for rank in sorted(found.plans))
    print_facts(
        [
            ("layout", found.layout.said),
            ("written", f"{total} in {tally.chunks.sum():,} chunks, {tally.keys.sum():,} keys"),
            ("files", f"{prediction.files:,}, index {size_text(prediction.index.total)}"),
            ("requests", f"{prediction.requests // found.layout.world} a rank, {prediction.requests:,} in all, a save"),
            ("counted", f"{found.layout.world:,} ranks in {found.seconds:.0f} s; planned as in a save: {planned}"),
        ]
    )
    say()
    parts = sorted(tally.by_part.items(), key=lambda item: -int(item[1].sum()))
    rows = [(part, size_text(int(of.sum())), size_text(int(of.max())), f"{(of > 0).sum():,}") for part, of in parts]
    print_table(("part", "bytes", "heaviest rank", "ranks"), rows, right=("bytes", "heaviest rank", "ranks"))
    say()
    numbers = ("bytes", "chunks", "numbers", "keys")
    shown = [(name, tally.work(rank)) for name, rank, _ in found.balance.rows]
    listed = [
        (name, size_text(work.bytes), *(f"{n:,}" for n in (work.chunks, work.numbers, work.keys)))
        for name, work in shown
    ]
    print_table(("rank", *numbers), listed, right=numbers)
    for line in found.balance.summary:
        say(line)
    say()
    seconds = [
        ("planning", f"{found.planning[0]:.2f}", f"the first time; {found.planning[1]:.2f} later"),
        ("save", f"{prediction.save:.1f}", f"{rates.host_write:g} GB/s a host, {rates.storage_write:g} in all"),
        ("load", f"{prediction.load:.1f}", f"{rates.host_read:g} GB/s a host, {rates.storage_read:g} in all"),
    ]
    if prediction.elsewhere is not None:
        other = prediction.elsewhere
        seconds.append(
            ("load elsewhere", f"{other.seconds:.1f}", f"{other.layout.said}; reads {other.read_over_held:.2f} x")
        )
    print_table(("", "seconds", "with"), seconds, right=("seconds",))

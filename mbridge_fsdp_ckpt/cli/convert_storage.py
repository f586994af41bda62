"""`convert`, on disk: `reshard`, `to-stock`, `from-stock`, `from-torch-dist`; without a GPU or a job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from mbridge_fsdp_ckpt.cli.console import Json
from mbridge_fsdp_ckpt.cli.convert_job import (
    TORCH_DIST,
    added_files,
    committing,
    counting,
    job_of,
    last_call,
    publish_to_tracker,
    show,
    write_safe,
)
from mbridge_fsdp_ckpt.convert.description import Description, describe, with_few_records
from mbridge_fsdp_ckpt.convert.from_stock import describe_stock
from mbridge_fsdp_ckpt.convert.shares import even_shares
from mbridge_fsdp_ckpt.convert.to_stock import not_in_stock, payload_files, write_stock
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.storage.commit.rename import RenameCommit
from mbridge_fsdp_ckpt.storage.format.names import FORMAT_NAME, STOCK_FORMAT, rank_of_payload
from mbridge_fsdp_ckpt.storage.format.reader import SafeSource
from mbridge_fsdp_ckpt.storage.source import CheckpointSource, StoredChunk
from mbridge_fsdp_ckpt.storage.stock.reader import DcpSource
from mbridge_fsdp_ckpt.storage.store import store_of

Source = Annotated[str, typer.Argument(help="An iteration directory, or the root of a run's checkpoints; path or URL.")]
Destination = Annotated[
    str, typer.Argument(help="The iteration directory to be made, such as new/iter_0000010; it must not exist yet.")
]


def from_stock(source: Source, destination: Destination, as_json: Json = False) -> None:
    """Convert a checkpoint that Bridge wrote alone (fsdp_dtensor) into fsdp_dtensor_safe.

    Every block stays with the rank that wrote it. Training goes on from the result as it would from the original.
    """
    with job_of(source, destination, FORMAT_NAME) as job:
        if not isinstance(job.source, DcpSource):
            raise ConfigurationError(
                expected=f"a checkpoint in the format {STOCK_FORMAT}",
                found=f"{job.directory}, which is in the format {FORMAT_NAME}",
                remedy="To change the number of its files, use reshard; for the other way, to-stock.",
            )
        chunks = job.source.chunks(job.source.head.keys)
        ranks = {rank_of_payload(chunk.path.name) for held in chunks.values() for chunk in held if chunk.box.volume}
        write_safe(job, describe_stock(job.source), _as_they_are, sorted(ranks))
    show(job.report, as_json)


def from_torch_dist(
    source: Source,
    destination: Destination,
    trust_run_config: Annotated[
        bool,
        typer.Option(
            "--trust-run-config",
            help="Let Bridge call what the checkpoint's run configuration names, which can be any code. Needed.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert Megatron's torch_dist checkpoint, which Bridge wrote, into fsdp_dtensor_safe.

    The model is built from the checkpoint's run_config.yaml, in one process, without a GPU or memory for its weights.
    Optimizer state comes along where it was saved by parameter (dist_ckpt_optim_fully_reshardable=True).
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            expected="one process",
            found=f"one of {os.environ['WORLD_SIZE']}",
            remedy="Start it without torchrun: tensors go from file to file, no rank holds a model.",
        )
    with job_of(source, destination, FORMAT_NAME, read=TORCH_DIST) as job:
        from mbridge_fsdp_ckpt.convert.torch_dist.description import describe_torch_dist

        assert isinstance(job.source, DcpSource)
        assert job.common is not None
        chunks, description = describe_torch_dist(job.source, job.common, trust_run_config=trust_run_config)
        job.report.keys = len(description.keys)
        held = (chunk for found in chunks.chunks(description.keys).values() for chunk in found)
        write_safe(job, description, _as_they_are, sorted({rank_of_payload(chunk.path.name) for chunk in held}), chunks)
    show(job.report, as_json)


def reshard(
    source: Source,
    destination: Destination,
    ranks: Annotated[int, typer.Option(min=1, help="How many payload files there are to be.")],
    merge_tables: Annotated[
        bool,
        typer.Option(
            "--merge-tables",
            help="Keep the random-number states of one rank for each (pipeline, tensor) place, as stock does, "
            "instead of a small table for every rank that saved.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint as if so many ranks had saved it: few large files out of many, or the reverse.

    Every tensor is split evenly along its first dimension. Reads both formats, writes fsdp_dtensor_safe.
    """

    def evenly(key: str, entry: KeyEntry, chunks: Sequence[StoredChunk]) -> Iterable[tuple[int, Box]]:
        return even_shares(key, entry.shape, dtype_from_name(entry.dtype).itemsize, ranks)

    with job_of(source, destination, FORMAT_NAME) as job:
        description = describe(job.source) if isinstance(job.source, SafeSource) else _described_stock(job.source)
        write_safe(job, with_few_records(description) if merge_tables else description, evenly, range(ranks))
    show(job.report, as_json)


def to_stock(source: Source, destination: Destination, as_json: Json = False) -> None:
    """Convert a checkpoint into fsdp_dtensor, which Bridge loads without this package.

    Notes name what stock has no place for. What is read is verified; stock itself has no checksums.
    """
    with job_of(source, destination, STOCK_FORMAT) as job:
        if not isinstance(job.source, SafeSource):
            raise ConfigurationError(
                expected=f"a checkpoint in the format {FORMAT_NAME}",
                found=f"{job.directory}, which is in the format {STOCK_FORMAT}",
                remedy="Stock loads it as it is; to convert it the other way, use from-stock.",
            )
        target = store_of(job.target).local
        if target is None:
            raise ConfigurationError(
                expected="a destination on a file system",
                found=str(job.target),
                remedy="Stock cannot tell a complete checkpoint in an object store from half of one: convert to a "
                "directory and copy that, .metadata last.",
            )
        job.report.notes += not_in_stock(job.source)
        files = payload_files(job.source)
        with committing(RenameCommit(target)) as place, counting(job, sum(file.size for file in files)) as count:
            write_stock(place, job.source, target, files, added_files(job), count, last_call(job))
        job.report.files = len(files)
        publish_to_tracker(job)
    show(job.report, as_json)


def _as_they_are(key: str, entry: KeyEntry, chunks: Sequence[StoredChunk]) -> Iterable[tuple[int, Box]]:
    return [(rank_of_payload(chunk.path.name), chunk.box) for chunk in chunks]


def _described_stock(source: CheckpointSource) -> Description:
    assert isinstance(source, DcpSource)
    return describe_stock(source)

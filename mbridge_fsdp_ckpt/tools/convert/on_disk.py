# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Conversions from directory to directory, without a GPU or a job: stock's formats, and other numbers of files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial

from mbridge_fsdp_ckpt.commit.rename import RenameCommit
from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.kinds import DirectoryKind
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, STOCK_FORMAT, rank_of_payload
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.progress import Progress
from mbridge_fsdp_ckpt.io.store import as_path, store_of
from mbridge_fsdp_ckpt.opening import kind_of, open_safe, open_stock
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.convert.description import Description, describe, with_few_records
from mbridge_fsdp_ckpt.tools.convert.from_stock import describe_stock
from mbridge_fsdp_ckpt.tools.convert.job import (
    AnyJob,
    Report,
    added_files,
    committing,
    counting,
    job_of,
    last_call,
    publish_to_tracker,
    write_safe,
)
from mbridge_fsdp_ckpt.tools.convert.shares import even_shares
from mbridge_fsdp_ckpt.tools.convert.to_stock import not_in_stock, payload_files, write_stock
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import TorchDistSource
from mbridge_fsdp_ckpt.tools.convert.torch_dist.reader import TORCH_DIST


def from_stock(source: str, destination: str, progress: Progress) -> Report:
    """Convert a checkpoint that Bridge wrote alone (fsdp_dtensor) into fsdp_dtensor_safe.

    Every block stays with the rank that wrote it. Training goes on from the result as it would from the original.

    Args:
        source: An iteration directory, or the root of a run's checkpoints.
        destination: The iteration directory to be made.
        progress: Who watches.

    Raises:
        CheckpointError: The source is not of that format, or cannot be read; or there is a destination.
            Nothing is left of what was begun.
    """
    opener = partial(open_stock, remedy="To change the number of its files, use reshard; for the other way, to-stock.")
    with job_of(source, destination, FORMAT_NAME, progress, opener) as job:
        chunks = job.source.chunks(job.source.metadata.keys)
        ranks = {rank_of_payload(chunk.path.name) for held in chunks.values() for chunk in held if chunk.box.volume}
        write_safe(job, describe_stock(job.source), _as_they_are, sorted(ranks))
    return job.report


def from_torch_dist(source: str, destination: str, progress: Progress, *, trust_run_config: bool) -> Report:
    """Convert Megatron's torch_dist checkpoint, which Bridge or Megatron-LM wrote, into fsdp_dtensor_safe.

    The model is built from the checkpoint's run_config.yaml, or Megatron-LM's arguments where there is none, in one
    process, without a GPU or memory for its weights.
    Optimizer state comes along where it was saved by parameter (dist_ckpt_optim_fully_reshardable=True).

    Args:
        source: An iteration directory, or the root of a run's checkpoints.
        destination: The iteration directory to be made.
        progress: Who watches.
        trust_run_config: Let Bridge call what the checkpoint's run_config.yaml names; refused without.

    Raises:
        CheckpointError: The source is not of that format, or cannot be read; or there is a destination.
            Nothing is left of what was begun.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            expected="one process",
            found=f"one of {os.environ['WORLD_SIZE']}",
            remedy="Start it without torchrun: tensors go from file to file, no rank holds a model.",
        )
    with job_of(source, destination, FORMAT_NAME, progress, TorchDistSource, TORCH_DIST) as job:
        from mbridge_fsdp_ckpt.tools.convert.torch_dist.description import describe_torch_dist

        common = job.source.common
        chunks, description = describe_torch_dist(job.source, common, trust_run_config=trust_run_config)
        job.report.keys = len(description.keys)
        held = (chunk for found in chunks.chunks(description.keys).values() for chunk in found)
        write_safe(job, description, _as_they_are, sorted({rank_of_payload(chunk.path.name) for chunk in held}), chunks)
    return job.report


def reshard(source: str, destination: str, progress: Progress, *, ranks: int, merge_ranks: bool) -> Report:
    """Rewrite a checkpoint as if so many ranks had saved it: few large files out of many, or the reverse.

    Every tensor is split evenly along its first dimension. Reads both formats, writes fsdp_dtensor_safe.

    Args:
        source: An iteration directory, or the root of a run's checkpoints.
        destination: The iteration directory to be made.
        progress: Who watches.
        ranks: How many payload files there are to be.
        merge_ranks: Keep the random-number states of one rank for each (pipeline, tensor) place.

    Raises:
        CheckpointError: The source cannot be read, or there is a destination.  Nothing is left of what was begun.
    """

    def evenly(key: str, entry: KeyEntry, chunks: Sequence[StoredChunk]) -> Iterable[tuple[int, Box]]:
        return even_shares(key, entry.shape, dtype_from_name(entry.dtype).itemsize, ranks)

    def written(job: AnyJob, description: Description) -> Report:
        write_safe(job, with_few_records(description) if merge_ranks else description, evenly, range(ranks))
        return job.report

    again = "The checkpoint was replaced meanwhile: start again."
    if kind_of(find_checkpoint(as_path(source))) is DirectoryKind.SAFE:
        with job_of(source, destination, FORMAT_NAME, progress, partial(open_safe, remedy=again)) as safe:
            return written(safe, describe(safe.source))
    with job_of(source, destination, FORMAT_NAME, progress, partial(open_stock, remedy=again)) as stock:
        return written(stock, describe_stock(stock.source))


def to_stock(source: str, destination: str, progress: Progress) -> Report:
    """Convert a checkpoint into fsdp_dtensor, which Bridge loads without this package.

    Notes name what stock has no place for. What is read is verified; stock itself has no checksums.

    Args:
        source: An iteration directory, or the root of a run's checkpoints.
        destination: The iteration directory to be made.
        progress: Who watches.

    Raises:
        CheckpointError: The source is not of this format, or cannot be read; or there is a destination.
            Nothing is left of what was begun.
    """
    opener = partial(open_safe, remedy="Stock loads it as it is; to convert it the other way, use from-stock.")
    with job_of(source, destination, STOCK_FORMAT, progress, opener) as job:
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
        with committing(RenameCommit(target)) as place:
            count = counting(job, sum(file.size for file in files), place)
            write_stock(place, job.source, target, files, added_files(job), count, last_call(job))
        job.report.files = len(files)
        publish_to_tracker(job)
    return job.report


def _as_they_are(key: str, entry: KeyEntry, chunks: Sequence[StoredChunk]) -> Iterable[tuple[int, Box]]:
    return [(rank_of_payload(chunk.path.name), chunk.box) for chunk in chunks]

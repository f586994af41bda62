# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do whose jobs share a rendezvous store, or meet in one that cannot tell who is late."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.models import Recipe
from testing.ranks import no_process_group
from tests.core import cases, oracle

JOB_RANKS = 2
FROZEN_LIMIT_S = 3.0


@no_process_group
def two_jobs(directory: str, port: int) -> list[Any]:
    """Two jobs that prefixes keep apart save and load at the same time: what each had, and found."""
    rank = int(os.environ["RANK"])
    job, own = divmod(rank, JOB_RANKS)
    server = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    store = dist.PrefixStore(f"job {job}", server)
    dist.init_process_group("gloo", store=store, rank=own, world_size=JOB_RANKS)
    trainable = cases.prepared(Recipe(layers=1), steps=1, seed=job)
    whole: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    seen: list[Any] = []
    for number in range(3):
        live = oracle.live(trainable)
        saving = mbridge_fsdp_ckpt.async_save(f"{directory}/{job}.{number}", **whole)
        saving.result()
        trainable.step(number)
        mbridge_fsdp_ckpt.load(f"{directory}/{job}.{number}", **whole)
        seen.append(oracle.live(trainable) == live)
    dist.destroy_process_group()
    server.add("left", 1)
    while rank == 0 and server.add("left", 0) < 2 * JOB_RANKS:
        pass
    return seen


@no_process_group
def frozen_host(directory: str, port: int, host: int) -> list[str]:
    """The host of the store is stopped: what a save, an asynchronous one and a load say, and then those after."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    options: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    options["settings"] = mbridge_fsdp_ckpt.Settings()
    said: list[str] = []
    calls: list[Any] = [
        lambda: mbridge_fsdp_ckpt.save(f"{directory}/a{len(said)}", **options),
        lambda: mbridge_fsdp_ckpt.async_save(f"{directory}/b{len(said)}", **options).result(),
        lambda: mbridge_fsdp_ckpt.load(f"{directory}/0", **options),
    ]
    mbridge_fsdp_ckpt.save(f"{directory}/0", **options)

    for stopped in (True, False):
        dist.barrier()
        if rank == 0:
            os.kill(host, signal.SIGSTOP if stopped else signal.SIGCONT)
        dist.barrier()
        options["settings"] = mbridge_fsdp_ckpt.Settings(time_limit=FROZEN_LIMIT_S if stopped else 60.0)
        for call in calls:
            begin = time.monotonic()
            try:
                call()
            except CheckpointError as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("done")
            assert time.monotonic() - begin < 20 * FROZEN_LIMIT_S
    dist.destroy_process_group()
    return said


@no_process_group
def refused(directory: str, kind: str) -> list[str]:
    """A job that met in such a store: what a save, an asynchronous one, and a load say."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert kind == "FileStore"
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}.store", size), rank=rank, world_size=size)
    trainable = cases.prepared(Recipe(layers=1), steps=1)
    whole: dict[str, Any] = {"model": trainable.model, "optimizer": trainable.optimizer}
    calls = (
        lambda: mbridge_fsdp_ckpt.save(directory, **whole),
        lambda: mbridge_fsdp_ckpt.async_save(directory, **whole),
        lambda: mbridge_fsdp_ckpt.load(directory, **whole),
    )

    said = []
    for call in calls:
        try:
            call()
        except CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return said

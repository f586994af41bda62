# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Counting collectives: by name, the outermost only, whoever imported the function under whatever name."""

import contextlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_earlier
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from testing.collectives import CollectiveCounts, count_collectives
from testing.ranks import RankPool


def count_one_of_each() -> tuple[dict[str, int], dict[str, int], int]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    one, two = torch.ones(1), torch.ones(2)
    objects: list[Any] = [None, None]
    with count_collectives() as counts:
        dist.all_gather_object(objects, rank)
        dist.all_gather([torch.ones(1), torch.ones(1)], one)
        dist.all_gather_into_tensor(torch.ones(2), one)
        dist.all_reduce(one)
        distributed_c10d.all_reduce(one)
        imported_earlier(one)
        dist.reduce_scatter_tensor(torch.ones(1), two)
        dist.reduce_scatter(torch.ones(1), [one, one])
        dist.reduce(one, 0)
        dist.broadcast(one, 0)
        dist.broadcast_object_list([rank], 0)
        dist.gather(one, [torch.ones(1), torch.ones(1)] if rank == 0 else None)
        dist.gather_object(rank, objects if rank == 0 else None)
        dist.scatter(torch.ones(1), [one, one] if rank == 0 else None)
        dist.scatter_object_list([None], [1, 2] if rank == 0 else None)
        dist.all_to_all_single(torch.ones(2), two)
        dist.barrier()
        dist.monitored_barrier()
        if rank == 0:
            dist.send(one, other)
        else:
            dist.recv(one, other)
    return dict(counts.collectives), dict(counts.point_to_point), counts.total


def test_every_collective_counts_once_under_its_name(rank_pool: RankPool) -> None:
    collectives = {
        "all_gather_object": 1,
        "all_gather": 1,
        "all_gather_into_tensor": 1,
        "all_reduce": 3,
        "reduce_scatter_tensor": 1,
        "reduce_scatter": 1,
        "reduce": 1,
        "broadcast": 1,
        "broadcast_object_list": 1,
        "gather": 1,
        "gather_object": 1,
        "scatter": 1,
        "scatter_object_list": 1,
        "all_to_all_single": 1,
        "barrier": 1,
        "monitored_barrier": 1,
    }
    first, second = rank_pool.run(count_one_of_each, ranks=2)
    assert first == (collectives, {"send": 1}, 18)
    assert second == (collectives, {"recv": 1}, 18)


def count_redistribution() -> tuple[dict[str, int], float]:
    mesh = init_device_mesh("cuda", (2,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with count_collectives() as counts:
        total = tensor.full_tensor().sum().item()
    return dict(counts.collectives), total


def test_dtensor_redistribution_counts(rank_pool: RankPool) -> None:
    name = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"  # torch before 2.12
    assert rank_pool.run(count_redistribution, ranks=2) == [({name: 1}, 4.0)] * 2


def count_when_a_collective_raises() -> tuple[dict[str, int], dict[str, int], int]:
    seen: list[CollectiveCounts] = []
    with contextlib.suppress(AttributeError, pickle.PicklingError), count_collectives() as counts:
        seen.append(counts)
        dist.barrier()
        dist.all_gather_object([None, None], lambda: None)  # a lambda cannot be pickled
    with count_collectives() as afterwards:
        dist.barrier()
    return dict(seen[0].collectives), dict(afterwards.collectives), seen[0].total


def test_an_error_ends_a_count(rank_pool: RankPool) -> None:
    expected = ({"all_gather_object": 1, "barrier": 1}, {"barrier": 1}, 2)
    assert rank_pool.run(count_when_a_collective_raises, ranks=2) == [expected, expected]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One process that passes for any rank of any job: torch's process group that sends nothing, and Megatron's groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout


@contextmanager
def as_rank(layout: JobLayout, rank: int) -> Iterator[None]:
    """Be this rank of the job while the body runs.

    Raises:
        ConfigurationError: This process is a rank already.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigurationError(
            expected="a process of its own for an estimate",
            found="a process group",
            remedy="Run it outside of a training job, without torchrun.",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            num_distributed_optimizer_instances=layout.instances,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def as_expert_rank(rank: int) -> Iterator[None]:
    """Be another expert-parallel rank while the body runs, as far as names are concerned."""
    from megatron.core import parallel_state

    own = parallel_state.get_expert_model_parallel_rank()
    parallel_state.set_expert_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_expert_model_parallel_rank(own)

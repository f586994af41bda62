# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The process group of a conversion."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import current_device_is_cpu_without_gpu


@contextmanager
def process_group_for_conversion() -> Iterator[None]:
    """A block with a default process group: the existing one, or one that `join` makes.

    A group that was made here is destroyed after the block, with Megatron's groups.  On a machine without a GPU, code
    in the block that moves tensors to the current CUDA device leaves them on the CPU.
    """
    is_made_here = not dist.is_initialized()
    if is_made_here:
        join()
    try:
        with current_device_is_cpu_without_gpu():
            yield
    finally:
        if is_made_here:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def join() -> None:
    """Join the process group that torchrun's variables describe, or make a group of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What any tensor of a model is to a checkpoint: this rank's elements, and the memory that they lie in."""

from __future__ import annotations

import torch


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself; detached, shares memory."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def storage_of(tensor: torch.Tensor) -> int:
    """A number that a tensor shares with its views; of its own, where it is not strided and so has no one storage."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)

"""Tensors between the call of a save and their copy: whether they are those of the call, and unchanged.

torch counts what changes a tensor in place (`_version`), whoever does it: `add_` and its like, under `no_grad` too,
`load_state_dict`, collectives that write.  Views and detached tensors share the counter of their base.  A DTensor has
one of its own beside that of its local tensor, which an operation on the DTensor leaves as it is: both are asked.  The
local tensors of Megatron-FSDP's parameters are views of a flat buffer, and count what is changed of any of that.

It does not count what goes through `.data`, through memory that others know by its address (kernels of Transformer
Engine, NumPy), or what a captured graph replays.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mbridge_fsdp_ckpt.errors import ChangedTensorError


class Watched:
    """Tensors as they are now.

    Args:
        tensors: Those that a save reads later.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = {id(tensor): (tensor, *_counted(tensor)) for tensor in tensors}

    def check(self, tensor: torch.Tensor, key: str) -> None:
        """See that a tensor has not changed until now: what has been read of it is as it was.

        Args:
            tensor: The parameter, the buffer, or what an optimizer keeps; no view of it.
            key: What it is saved as.

        Raises:
            ChangedTensorError: It has, or is none of those that there were.
        """
        _, local, before = self._seen.get(id(tensor), (None, None, 0))
        there, now = _counted(tensor)
        if there is local and now == before:
            return
        found = f"that it was changed in place {now - before} times, it or one that shares its memory"
        raise ChangedTensorError(
            expected="the tensor as it was at the call of the save, until it is copied",
            found=found if there is local else "another one in its place",
            remedy="Before tensors change otherwise than in the step of an optimizer, call Saving.wait_until_taken(). "
            "Nothing was committed; the next save is a new one.",
            key=key,
        )


def _counted(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What has its elements, and how often it was changed; of tensors made for inference torch counts nothing."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.is_inference():
        return local, 0
    return local, local._version if local is tensor else local._version + tensor._version

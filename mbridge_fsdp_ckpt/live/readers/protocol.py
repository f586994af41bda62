# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What save and load need of a wrapper: one protocol, and the data that it speaks of.

A reader observes one wrapped model.  It asks no other rank, and but for `Reader.refresh` it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from mbridge_fsdp_ckpt.families.declaration import ParameterContext
from mbridge_fsdp_ckpt.plan.boxes import Shape
from mbridge_fsdp_ckpt.plan.layout import ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import ParameterPlan

Ranks = tuple[int, ...]
"""Global ranks, in order."""

EXTRA_STATE = "_extra_state"
"""The last part of the name under which a state dict has what `get_extra_state` returned."""

_MOMENTS = 8
"""Bytes of both of one element."""


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A tensor of the model, and where it lies.

    Args:
        layout: Its place in the global tensor.
        context: What a family may look at; None where none is asked.
        tensor: The parameter that the optimizer updates, the main weight; or a persistent buffer.
    """

    layout: ParameterLayout
    context: ParameterContext | None
    tensor: torch.Tensor

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer: whole on every rank that has it."""
        return not isinstance(self.tensor, torch.nn.Parameter)

    @property
    def bytes_per_element(self) -> int:
        """About what is saved for each of its elements: the weight and, if it is trained, Adam's two moments."""
        return self.tensor.dtype.itemsize + (_MOMENTS if self.tensor.requires_grad else 0)


class Job(NamedTuple):
    """The running job, as it is now.

    Args:
        place: This rank's along each parallel dimension, by name; `rank` is one.
        sizes: Of each dimension, by name; `world` is one.  `strategy` is how the wrapper shards, in its own words.
    """

    place: dict[str, int]
    sizes: dict[str, int | str]


class Look(NamedTuple):
    """What a model holds now.

    Args:
        tensors: Its parameters and persistent buffers.
        parts: The modules that it is made of.
        marks: What `Reader.layouts` depends on: as long as they are equal, so are layouts.  None where that is
            unknown, and layouts are made anew.
    """

    tensors: list[torch.Tensor]
    parts: list[Any]
    marks: list[Any] | None


class Names(Protocol):
    """What a model's parameters, buffers and modules are called on disk."""

    def on_disk(self, name: str, root: str = "") -> str:
        """The name on disk of what has a dotted name below `root`."""


class Reader(Protocol):
    """One wrapped model, seen by save and load.

    A save calls `look`, and `layouts` where the marks changed since the last one.  A load calls both, then `peers` of
    what it needs, and `refresh` once weights are filled.  `whole` places what modules keep beside tensors.
    """

    @property
    def module(self) -> Any:
        """The module whose state dict is saved."""

    @property
    def job(self) -> Job:
        """The running job."""

    @property
    def naming(self) -> Names:
        """Names on disk."""

    @property
    def lists_groups(self) -> bool:
        """Whether param groups hold all of their parameters on every rank.

        DCP metadata then has them as torch's `get_state_dict` gives them, otherwise by parameter, as stock does.
        """

    def look(self) -> Look:
        """The tensors as they are now.

        Raises:
            CheckpointError: The model has something that cannot be saved.
        """

    def layouts(self) -> list[ModelParameter]:
        """Where each tensor of `look` lies, in the same order.

        Raises:
            LayoutError: What the wrapper says of a tensor contradicts it.
        """

    def whole(self, key: str, shape: Shape) -> ParameterLayout:
        """The layout of what is whole on every rank that has a module.

        Args:
            key: Its name on disk.
            shape: Its shape.
        """

    def peers(self, plan: ParameterPlan) -> Ranks:
        """The ranks that hold the very same of a parameter as this one, which is among them; the same on each."""

    def refresh(self) -> None:
        """Make loaded weights those that compute.  All ranks call it."""

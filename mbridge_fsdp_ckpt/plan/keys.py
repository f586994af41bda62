# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Keys on disk, and what one says of its tensor, over all ranks."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mbridge_fsdp_ckpt.plan.dtypes import dtype_from_name

MODEL_PREFIX, STATE_PREFIX = "model.", "optimizer.state."
"""What keys of weights and of optimizer slots begin with, as stock `fsdp_dtensor` names them."""

MAX_INT = (1 << 63) - 1

Count = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]

Kind = Literal["sharded", "tensor", "int", "float", "bool"]
"""Of a tensor: cut like its parameter, a tensor of no dimensions, or a number of Python's."""

Section = Literal["model", "optimizer"]
"""What keys begin with."""


def _dtype(name: str) -> str:
    dtype_from_name(name)
    return name


class Entry(BaseModel):
    """Data from disk, checked when built."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # unknown fields belong to newer minor versions


class KeyEntry(Entry):
    """One key: a tensor over all ranks.

    Args:
        dtype: Of its elements on disk.
        shape: Over all ranks.
        kind: Whether it is cut like its parameter, or a scalar, and of which type.
        family: The family that split it, with its version.
        component: What the family calls it.
        unpadded_rows: Rows of the vocabulary without its padding.
        kept_as: Of an optimizer slot, the dtype in which the optimizer kept it: of one that is kept with a scale, on
            disk are the values that it stands for.
        kept_by: Of an optimizer slot, the class that kept it, where that is none of torch's or Transformer Engine's.
    """

    dtype: Annotated[str, AfterValidator(_dtype)]
    shape: tuple[Count, ...]
    kind: Kind = "sharded"
    family: str | None = None
    component: str = ""
    unpadded_rows: Count | None = None
    kept_as: Annotated[str, AfterValidator(_dtype)] | None = None
    kept_by: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.bytes_of(math.prod(self.shape))

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many of its elements."""
        return elements * dtype_from_name(self.dtype).itemsize

    @property
    def is_sharded(self) -> bool:
        """Whether it lies in payload files; the number of another kind stands in the index."""
        return self.kind == "sharded"


def slot_key(name: str, slot: str) -> str:
    """Key on disk of an optimizer slot, by its component's name in the optimizer's state."""
    return f"{STATE_PREFIX}{name}.{slot}"


def name_and_slot(key: str) -> tuple[str, str] | None:
    """An optimizer slot's name in the optimizer's state, and the slot; None for any other key."""
    if not key.startswith(STATE_PREFIX):
        return None
    name, _, slot = key.removeprefix(STATE_PREFIX).rpartition(".")
    return name, slot

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Families declare, the planner executes.

A fused parameter is several logical tensors (components) stacked along the first dimension.
Tensor parallelism cuts each component for itself, so that a checkpoint can only be loaded at another tensor-parallel
size if the components stand apart on disk.  A family says which components a parameter holds, in which order and with
how many rows:

    SwiGLU linear_fc1.weight on one of two TP ranks        on disk
        rows 0..47    gate   (half of it)                      linear_fc1.weight_w  (96 rows)
        rows 48..95   up     (half of it)                      linear_fc1.weight_v  (96 rows)

A suffix may recur (interleaved layouts): its rows then follow one another in the component.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a fused parameter.

    Args:
        suffix: Appended to the parameter's key on disk to name the component: the rows of `linear_fc1.weight` with the
            suffix "_w" have the key `linear_fc1.weight_w`.
        rows: Number of rows on this tensor-parallel rank.
        module: The name in the key on disk of the module that owns the parameter; empty for the module's own name.
            With "query" for the module `linear_qkv`, the key is `query.weight`.
    """

    suffix: str
    rows: int
    module: str = ""


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """The parameter that a family is asked about.

    Args:
        name: Dotted parameter name inside the model.
        ancestors: (dotted path, module) from the module that owns the parameter up to the root.
        local_shape: Shape on one tensor-parallel rank, before data-parallel sharding.
        fused: The framework's mark that the parameter is several in one; empty where there is none.
    """

    name: str
    ancestors: tuple[tuple[str, Any], ...]
    local_shape: tuple[int, ...]
    fused: str = ""

    @property
    def leaf(self) -> str:
        """The parameter's own name: weight, bias, weight3."""
        return self.name.rpartition(".")[2]

    def ancestor(self, level: int) -> Any | None:
        """The module that owns the parameter (level 0), its parent (1), ...; None above the root."""
        return self.ancestors[level][1] if level < len(self.ancestors) else None

    def child_name(self, level: int) -> str:
        """The name of the attribute under which `ancestor(level)` is registered in its parent."""
        return self.ancestors[level][0].rpartition(".")[2] if level < len(self.ancestors) else ""


@runtime_checkable
class Family(Protocol):
    """One model family's knowledge of its fused parameters.

    Attributes:
        name: A name that no other family has.
        version: Recorded with each key that the family splits.  Raise it when the same parameter is split differently.
    """

    name: str
    version: int

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """The parameter's segments along its first dimension, in order; None if the parameter is not this family's.

        Args:
            parameter: Its name, the modules that own it, and its shape on one tensor-parallel rank.
        """


@dataclass(frozen=True, slots=True)
class Claim:
    """A family's answer for one parameter, checked.

    Args:
        family: The family's name.
        version: The family's version.
        segments: Rows that add up to those of the parameter.
    """

    family: str
    version: int
    segments: tuple[Segment, ...]

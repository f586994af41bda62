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
        suffix: Appended to the parameter's key on disk; with `module` it names the component.
        rows: Number of rows on this tensor-parallel rank.
        module: What the key on disk calls the module that owns the parameter, where it is not that module's name.
    """

    suffix: str
    rows: int
    module: str = ""


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """What a family may look at.

    Args:
        name: Dotted parameter name inside the model.
        ancestors: (dotted path, module) from the module that owns the parameter up to the root.
        local_shape: Shape on one tensor-parallel rank, before data-parallel sharding.
        fused: How the framework marks the parameter as several in one; empty where it does not.
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
        """The attribute under which `ancestor(level)` hangs in its parent."""
        return self.ancestors[level][0].rpartition(".")[2] if level < len(self.ancestors) else ""


@runtime_checkable
class Family(Protocol):
    """One model family's knowledge of its fused parameters.

    Attributes:
        name: A name that no other family has.
        version: Recorded with each key that the family splits; to be raised when the same parameter would split
            otherwise.
    """

    name: str
    version: int

    def segments(self, parameter: ParameterContext) -> tuple[Segment, ...] | None:
        """The parameter's segments along its first dimension, in order; None where it is not this family's.

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

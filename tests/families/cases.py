# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests by model family; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import mbridge_fsdp_ckpt
from testing.kernels import replace_cuda_only_kernels
from tests.families import models
from tests.families.reference import (
    Comparison,
    Layout,
    Subject,
    Weights,
    compare,
    fill_slots,
    initialise,
    randomise,
    read_reference,
    wrap,
    write_reference,
)

SEED, OTHER_SEED = 123, 999


def reference(directory: str, model: str) -> int:
    """Write the unsharded model, on one rank."""
    replace_cuda_only_kernels()
    initialise(Layout(), SEED)
    module = models.build(model, Layout())
    randomise(module, SEED)
    write_reference(directory, module)
    return sum(parameter.numel() for parameter in module.parameters())


def save(directory: str, reference: str, model: str, layout: Layout) -> dict[str, Any]:
    """Save the reference model, wrapped, with an optimizer state that follows it."""
    subject, weights = _with_reference(reference, model, layout)
    filled = fill_slots(subject)
    found = compare(subject, weights)
    assert not found.different, f"before the save: {found.different}"
    assert len(found.slots) == filled
    mbridge_fsdp_ckpt.save(directory, model=subject.model, optimizer=subject.optimizer, values={"iteration": 5})
    return _report(found)


def load(directory: str, reference: str, model: str, layout: Layout, again: str = "") -> dict[str, Any]:
    """Load into a model of other weights, compare with Megatron's own; save once more."""
    replace_cuda_only_kernels()
    initialise(layout, OTHER_SEED)
    weights = read_reference(reference, models.build(model, layout), models.corrected)
    subject = wrap(models.build(model, layout), layout)
    before = compare(subject, weights)
    loaded = mbridge_fsdp_ckpt.load(directory, model=subject.model, optimizer=subject.optimizer)
    assert loaded.values["iteration"] == 5
    found = compare(subject, weights)
    if again:
        mbridge_fsdp_ckpt.save(again, model=subject.model, optimizer=subject.optimizer, values={"iteration": 5})
    return {"before": before.different, **_report(found)}


def _report(found: Comparison) -> dict[str, Any]:
    return {name: getattr(found, name) for name in ("compared", "trained", "slots", "elements", "different")}


def _with_reference(reference: str, model: str, layout: Layout) -> tuple[Subject, Weights]:
    replace_cuda_only_kernels()
    initialise(layout, OTHER_SEED)
    module = models.build(model, layout)
    weights = read_reference(reference, module, models.corrected)
    return wrap(module, layout), weights

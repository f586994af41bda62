# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's and Bridge's ranks, patient with gloo, and what several tests load from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import BRIDGE_MODULES, MEGATRON_MODULES
from testing.templates import Templates
from tests.families.shelf import Shelf
from tests.patience import patient_ranks

# Most models hold Transformer Engine's modules, and those of Gated DeltaNet need flash-linear-attention to be built.
NEEDED = ("megatron.core", "transformer_engine", "fla")


@pytest.fixture(scope="package")
def shelf(templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """References and checkpoints of Megatron-Core's models."""
    yield from _shelf(templates, tmp_path_factory.mktemp("shelf"), MEGATRON_MODULES, NEEDED)


@pytest.fixture(scope="package")
def bridge_shelf(templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """References and checkpoints of models that Bridge changed."""
    yield from _shelf(templates, tmp_path_factory.mktemp("bridge-shelf"), BRIDGE_MODULES, (*NEEDED, "megatron.bridge"))


def _shelf(templates: Templates, folder: Path, modules: tuple[str, ...], needed: tuple[str, ...]) -> Iterator[Shelf]:
    for pool in patient_ranks(templates, needed, modules):
        yield Shelf(pool, folder)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Layouts and sharding strategies, with one model that has a fused parameter of each kind.

A load that saves again must write what it read, bit for bit: so a layout is tested as the one that is saved in, too.
"""

from __future__ import annotations

import pytest

from tests.families.reference import Layout
from tests.families.shelf import Shelf
from tests.soak import sampling

SAVED_IN = Layout(4, tensor=2, expert=2)
TIED_SAVED_IN = Layout(4, tensor=2)

LAYOUTS: dict[str, Layout] = {
    "TP 2, ETP 2": Layout(2, tensor=2, expert_tensor=2),
    "TP 1, ETP 2": Layout(2, expert_tensor=2),
    "TP 2, EP 2, ETP 2": Layout(4, tensor=2, expert=2, expert_tensor=2),
    "TP 1, EP 2, ETP 2": Layout(4, expert=2, expert_tensor=2),
    "TP 4": Layout(4, tensor=4),
    "TP 4, EP 2, ETP 2": Layout(4, tensor=4, expert=2, expert_tensor=2),
    "TP 4, ETP 4": Layout(4, tensor=4, expert_tensor=4),
    "CP 2": Layout(2, context=2),
    "TP 2, CP 2": Layout(4, tensor=2, context=2),
    "no_shard": Layout(2, strategy="no_shard"),
    "no_shard, TP 2, EP 2": Layout(4, tensor=2, expert=2, strategy="no_shard"),
    "optim": Layout(2, strategy="optim"),
    "optim, TP 2, ETP 2": Layout(4, tensor=2, expert_tensor=2, strategy="optim"),
    "optim_grads": Layout(2, strategy="optim_grads"),
    "optim_grads, EP 2": Layout(4, expert=2, strategy="optim_grads"),
    "hybrid": Layout(4, instances=2),
    "hybrid, outer sharded": Layout(4, instances=2, outer="optim"),
    "hybrid, TP 2": Layout(4, tensor=2, instances=2),
    "hybrid, outer sharded, TP 2": Layout(4, tensor=2, instances=2, outer="optim"),
    "hybrid, EP 2": Layout(4, expert=2, instances=2),
    "hybrid, outer sharded, EP 2": Layout(4, expert=2, instances=2, outer="optim"),
}

OF_OTHER_MODELS: dict[str, Layout] = {
    "2 ranks": Layout(2),
    "TP 2, no_shard": Layout(2, tensor=2, strategy="no_shard"),
    "TP 4, optim": Layout(4, tensor=4, strategy="optim"),
    "hybrid, outer sharded": Layout(4, instances=2, outer="optim"),
}


@pytest.mark.parametrize("name", sampling.drawn("layouts", list(LAYOUTS), share=4))
def test_every_layout(name: str, shelf: Shelf) -> None:
    shelf.check("everything", SAVED_IN, LAYOUTS[name])


@pytest.mark.quick
@pytest.mark.parametrize("name", sampling.drawn("tied embeddings", list(OF_OTHER_MODELS), share=4))
def test_tied_embeddings(name: str, shelf: Shelf) -> None:
    shelf.check("tied", TIED_SAVED_IN, OF_OTHER_MODELS[name])


@pytest.mark.parametrize("name", sampling.drawn("frozen parameters", list(OF_OTHER_MODELS), share=4))
def test_parameters_that_do_not_train(name: str, shelf: Shelf) -> None:
    shelf.check("frozen", SAVED_IN, OF_OTHER_MODELS[name])

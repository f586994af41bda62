# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Decoupled gradients, as in issue 4910, train the same weights as others: norms have copies on tensor-parallel ranks.

megatron-core 0.19 does not sum the copies' gradients where they are decoupled.  The copies then drift apart, and no
checkpoint could resume the run bit for bit; `register()` mends that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.modules import BRIDGE_MODULES
from testing.ranks import RankPool
from tests.patience import patient_ranks
from tests.recipes.runs import Run, train

pytestmark = pytest.mark.bridge

# Megatron's norm of decoupled gradients is another number, on all ranks alike: clipping would scale the update by it.
SETTINGS = ("model.context_parallel_size=1", "scheduler.lr_warmup_iters=0", "optimizer.clip_grad=0.0")
COUPLED = ("optimizer.use_precision_aware_optimizer=false", "ddp.megatron_fsdp_use_decoupled_grad=false")


@pytest.fixture
def evenly_rounding_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """Two ranks that round an element the same wherever it lies: vector kernels take a tensor's last ones apart.

    Both kinds of gradients are laid out differently.  With AVX2 alone the third loss differed by 1.2e-6 of it.
    """
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    yield from patient_ranks(None, ("transformer_engine", "megatron.bridge"), BRIDGE_MODULES, ranks=2)


def test_decoupled_gradients_train_the_same_weights(evenly_rounding_ranks: RankPool, tmp_path: Path) -> None:
    run = Run("qwen35_35b_a3b_pretrain_tiny", str(tmp_path / "decoupled"), arguments=SETTINGS)
    [decoupled, _] = evenly_rounding_ranks.run(train, run)
    other = run.on(directory=str(tmp_path / "coupled"), arguments=(*SETTINGS, *COUPLED))
    assert evenly_rounding_ranks.run(train, other)[0] == decoupled
    assert len(set(decoupled.values())) == 3, "the weights do not move"

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: layer numbers in keys are global, tied embeddings are one tensor.

Released Megatron-FSDP refuses pipeline sizes above 1, so that this is proven on the stages' modules, without sharding:
their names are compared with those that Megatron-Core's `sharded_state_dict` gives them, their plans with those of the
undivided model.  The last test is the same on real ranks, for the release that allows it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.live.context import context_of
from mbridge_fsdp_ckpt.live.readers.megatron_fsdp import naming_of
from mbridge_fsdp_ckpt.plan.boxes import FlatRange
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import plan_parameter
from testing.models import config, initialise, layer
from testing.ranks import RankPool

LAYERS = 4


def _stage(stages: int, tied: bool, uneven: bool) -> Any:
    """This rank's stage of a GPT model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    initialise(1, pipeline_model_parallel_size=stages)
    settings = config(
        num_layers=LAYERS,
        gated_linear_unit=True,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.bfloat16,
        num_layers_in_first_pipeline_stage=1 if uneven and stages > 1 else None,
    )
    spec = layer(settings)
    spec.submodules.sharded_state_dict_keys_map = {}  # Transformer Engine's names of these norms, for torch_dist alone
    return GPTModel(
        settings,
        spec,
        64,
        16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def described(stages: int, tied: bool, uneven: bool) -> dict[str, Any]:
    """One stage: its names beside Megatron's, and for each key on disk its shape and whether this stage writes it."""
    model = _stage(stages, tied, uneven)
    naming, modules = naming_of(model), dict(model.named_modules())
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": _data_group()}
    theirs = {name: tensor.key for name, tensor in model.sharded_state_dict(metadata=metadata).items()}
    names, keys = {}, []
    for name, parameter in model.named_parameters():
        on_disk = naming.on_disk(name)
        names[name] = (on_disk, theirs[name])
        shape, is_copy = tuple(parameter.shape), naming.is_copy(name)
        layout = ParameterLayout(
            on_disk, on_disk, shape, None, Axis(0, 1), FlatRange(0, parameter.numel()), Axis(0, 1), is_copy
        )
        plan = plan_parameter(layout, default_registry().claim(context_of(name, modules, parameter)))
        keys += [(plan.model_key(p.component), p.component.global_shape, p.writes) for p in plan.slices]
    return {"names": names, "keys": keys}


def _data_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "uneven"), [(2, False), (2, True), (4, False)])
def test_stages_name_and_plan_what_the_undivided_model_does(
    stages: int, uneven: bool, tied: bool, megatron_ranks: RankPool
) -> None:
    (whole,) = megatron_ranks.run(described, 1, tied, uneven, ranks=1)
    parts = megatron_ranks.run(described, stages, tied, uneven, ranks=stages)
    for part in parts:
        assert {name: pair for name, pair in part["names"].items() if pair[0] != pair[1]} == {}
    written = [(key, shape) for part in parts for key, shape, writes in part["keys"] if writes]
    assert len(written) == len(set(written))
    assert set(written) == {(key, shape) for key, shape, _ in whole["keys"]}
    copies = [key for part in parts for key, _, writes in part["keys"] if not writes]
    assert copies == (["model.embedding.word_embeddings.weight"] if tied else [])
    numbers = {int(key.split(".layers.")[1].split(".")[0]) for key, _ in written if ".layers." in key}
    assert numbers == set(range(LAYERS))


def wrapped() -> str:
    """What Megatron-FSDP says to two stages."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    model = _stage(2, tied=False, uneven=False)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    try:
        FullyShardedDataParallel(model.config, config, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_stages_on_real_ranks_wait_for_megatron_fsdp(megatron_ranks: RankPool) -> None:
    refusal = megatron_ranks.run(wrapped, ranks=2)[0]
    if refusal:
        pytest.skip(f"this Megatron-FSDP refuses pipeline stages: {refusal[:200]}")
    pytest.fail("Megatron-FSDP allows pipeline stages now: add pipeline layouts to test_layouts.py")

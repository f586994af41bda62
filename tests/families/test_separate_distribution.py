# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The example of docs/families.md, installed as a distribution of its own: found, used, and missed where it is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.live.tensors import local_shard
from testing.ranks import RankPool
from tests.core import oracle
from tests.families.reference import Layout, initialise

ROWS, WIDTH = 8, 4
KEYS = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
VALUES = -1 - KEYS
KEY = "model.module.kv_proj.weight"


def _example(language: str, containing: str) -> str:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    (block,) = [text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if containing in text]
    return str(block)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in a folder that this process, and the ranks, import from."""
    project, site = tmp_path / "project", tmp_path / "site"
    package = project / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "checkpointing.py").write_text(_example("python", "class StackedKeyValueFamily"))
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n'
        '[project]\nname = "my-package"\nversion = "1"\n\n' + _example("toml", "entry-points")
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(site), str(project)], check=True)
    monkeypatch.syspath_prepend(str(site))


def _attention(tensor: int) -> Any:
    """A module with one parameter, marked as Megatron-Core marks what is fused."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        gradient_accumulation_fusion=False,
    )
    module = MegatronModule(config)
    module.kv_proj = ColumnParallelLinear(
        WIDTH, 2 * ROWS, config=config, init_method=torch.nn.init.ones_, bias=False, stride=2
    )
    return module


def _wrapped(module: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    return FullyShardedDataParallel(module.config, config, module, fsdp_unit_modules=[type(module.kv_proj)])


def save(directory: str, tensor: int) -> str:
    """Rows of keys above rows of values, as this tensor-parallel rank holds them; the error, if there was one."""
    from megatron.core import parallel_state

    default_registry.cache_clear()  # the rank may have looked before the distribution was installed
    initialise(Layout(tensor=tensor), 1)
    module = _attention(tensor)
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        module.kv_proj.weight.copy_(torch.cat([part.chunk(tensor)[rank] for part in (KEYS, VALUES)]))
    try:
        mbridge_fsdp_ckpt.save(directory, model=_wrapped(module))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        default_registry.cache_clear()
    return ""


def load(directory: str, tensor: int) -> Any:
    """This rank's elements after a load, as they should be; or the error."""
    from megatron.core import parallel_state

    default_registry.cache_clear()
    initialise(Layout(tensor=tensor), 1)
    model = _wrapped(_attention(tensor))
    try:
        mbridge_fsdp_ckpt.load(directory, model=model)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        default_registry.cache_clear()
    rank = parallel_state.get_tensor_model_parallel_rank()
    whole = torch.cat([part.chunk(tensor)[rank] for part in (KEYS, VALUES)]).reshape(-1)
    parameter: Any
    (parameter,) = [p for p in model.module.state_dict(keep_vars=True).values() if isinstance(p, torch.nn.Parameter)]
    expected = whole[parameter.megatron_fsdp_slice]
    found = local_shard(parameter).reshape(-1)
    return found.numel() if torch.equal(found, expected) else f"{found} instead of {expected}"


@pytest.mark.usefixtures("installed")
def test_an_installed_family_is_found_and_used(megatron_ranks: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    assert megatron_ranks.run(save, str(directory), 2, ranks=2) == ["", ""]
    assert {key: tuple(t.shape) for key, t in oracle.tensors_on_disk(directory).items()} == {
        f"{KEY}.key": (ROWS, WIDTH),
        f"{KEY}.value": (ROWS, WIDTH),
    }
    for ranks, tensor in ((1, 1), (4, 4), (2, 2), (4, 2), (4, 1)):
        elements = megatron_ranks.run(load, str(directory), tensor, ranks=ranks)
        assert sum(elements) == 2 * KEYS.numel(), elements


def test_without_it_a_save_says_what_is_lacking(megatron_ranks: RankPool, tmp_path: Path) -> None:
    errors = megatron_ranks.run(save, str(tmp_path / "checkpoint"), 2, ranks=2)
    assert errors[0] == errors[1]
    assert errors[0].startswith("FamilyError")
    for part in ("partition_stride 2", "kv_proj.weight", f"({ROWS}, {WIDTH})", "docs/families.md"):
        assert part in errors[0]
    assert not (tmp_path / "checkpoint").exists()


def test_without_it_a_checkpoint_made_with_it_is_refused(
    installed: None, megatron_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    assert megatron_ranks.run(save, str(directory), 1, ranks=1) == [""]
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(tmp_path))])
    (error,) = megatron_ranks.run(load, str(directory), 1, ranks=1)
    assert "'stacked_key_value', version 1" in error
    assert "no such family" in error

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `megatron.training`'s own loop saved in `torch_dist`, which has no run configuration, goes on under FSDP."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import read_state
from testing.ranks import RankPool
from tests.convert import storage_torch_dist
from tests.core import oracle
from tests.megatron_lm.running import pretrain

pytestmark = pytest.mark.bridge


@pytest.fixture(scope="module")
def saved(training_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations at TP 2 with Megatron's distributed optimizer."""
    place = tmp_path_factory.mktemp("torch_dist")
    more = ("--tensor-model-parallel-size", "2", "--dist-ckpt-optim-fully-reshardable")
    for result in training_ranks.run(pretrain, "torch_dist", str(place), 2, *more, wrapped=False, ranks=2):
        assert result["code"] == 0, result["out"]
    return place


def test_the_arguments_tell_the_model_and_training_goes_on(
    saved: Path, training_ranks: RankPool, tmp_path: Path
) -> None:
    assert not (saved / "iter_0000002" / "run_config.yaml").exists()
    after = tmp_path / "iter_0000002"
    [report] = training_ranks.run(storage_torch_dist.convert, str(saved), str(after), trusted=False, ranks=1)
    assert (report["read"], report["written"], report["tracker"]) == ("torch_dist", "fsdp_dtensor_safe", True)
    assert report["resume"] == f"--load {tmp_path}"
    whole = storage_torch_dist.expected(saved / "iter_0000002")
    expected = {key: oracle.digest(tensor) for key, tensor in whole.items()}
    assert len([key for key in expected if key.endswith(".exp_avg")]) == 17  # 15 parameters, 2 of them split in two
    assert oracle.on_disk(after) == expected
    schedule = "--use-checkpoint-opt-param-scheduler"
    results = training_ranks.run(pretrain, "fsdp_dtensor_safe", str(tmp_path), 3, schedule, ranks=2)
    for result in results:
        assert result["code"] == 0, result["out"]
    assert re.search(r"iteration +3/ +3 \| consumed samples: +24 ", results[-1]["out"])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"spec": ["os", "getcwd"]}, "found spec=['os', 'getcwd']"),
        ({"heterogeneous_layers_config_path": "/etc/passwd"}, "found heterogeneous_layers_config_path="),
        ({"swiglu": None}, "expected swiglu among Megatron-LM's arguments"),
        ({"num_layers": 3}, "KeyMismatchError"),
        ({"hidden_size": "x"}, "expected a model that Megatron-Bridge builds from Megatron-LM's arguments"),
    ],
)
def test_arguments_that_do_not_tell_it_are_refused(
    changed: dict[str, object], says: str, saved: Path, training_ranks: RankPool, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    state = read_state(DcpSource(old / "iter_0000002"))
    state["args"] |= changed
    plain = {name: value for name, value in state["args"].items() if type(value) in (bool, int, float, str, list)}
    none = {name: None for name, value in state["args"].items() if value is None and name not in changed}
    arguments = argparse.Namespace(**plain, **none, params_dtype=torch.bfloat16)
    torch.save({"args": arguments}, old / "iter_0000002" / "common.pt")
    convert = (storage_torch_dist.convert, str(old), str(tmp_path / "new" / "iter_0000002"))
    [said] = training_ranks.run(*convert, fails=True, trusted=False, ranks=1)
    assert says in said
    assert not (tmp_path / "new").exists()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Conversion on a machine without a GPU: code that names a CUDA device gets tensors of the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one, current_device_is_cpu_without_gpu
from testing.ranks import RankPool
from tests.convert import hugging_face_runs as runs
from tests.models import hugging_face
from tests.upstream import is_before

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def _current() -> torch.device:
    """As MiniMax-M2's bridge writes it."""
    return torch.device("cuda", torch.cuda.current_device())


ASKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to a device": lambda t: t.to(device=_current(), dtype=torch.bfloat16),
    "to a device, by place": lambda t: t.to(_current(), torch.bfloat16),
    "to an index": lambda t: t.to(torch.cuda.current_device(), torch.bfloat16),
    "to an index, by name": lambda t: t.to(device=torch.cuda.current_device(), dtype=torch.bfloat16),
    "cuda": lambda t: t.to(torch.bfloat16).cuda(torch.cuda.current_device()),
    "like another": lambda t: torch.empty_like(t, device=_current(), dtype=torch.bfloat16).copy_(t),
    "made on an index": lambda t: torch.empty(2, 3, device=torch.cuda.current_device(), dtype=torch.bfloat16).copy_(t),
    "a module's": lambda t: _module(t).to(torch.cuda.current_device()).weight.detach(),
    "a module's, by cuda": lambda t: _module(t).cuda(torch.cuda.current_device()).weight.detach(),
}


ASKING_FOR_MORE = ["GlmMoeDsaForCausalLM"]
"""Its bridge chooses a dispatcher of tokens that only GPUs have, and attention that wants sequence parallelism."""


def _module(tensor: torch.Tensor) -> Any:
    module = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(tensor)
    return module


@pytest.mark.parametrize("context", [current_device_is_cpu_without_gpu, as_if_there_was_one])
@pytest.mark.parametrize("how", ASKED)
def test_a_tensor_that_is_asked_for_on_cuda_is_the_hosts(how: str, context: Callable[[], Any]) -> None:
    before = torch.cuda.current_device, torch.cuda.is_available
    tensor = torch.arange(6.0).reshape(2, 3)
    with context():
        assert type(torch.cuda.current_device()) is int
        assert (_current().type, torch.device("meta").type) == ("cpu", "meta")
        found = ASKED[how](tensor)
        assert tensor.reshape(3, 2).shape == (3, 2)  # a number is a device to few functions
    assert (found.device.type, found.dtype) == ("cpu", torch.bfloat16)
    assert torch.equal(found.float(), tensor)
    assert (torch.cuda.current_device, torch.cuda.is_available) == before


@pytest.mark.bridge
@pytest.mark.parametrize("name", [*hugging_face.ASKING_FOR_CUDA, *ASKING_FOR_MORE])
def test_models_whose_bridges_ask_for_more_than_weights_need(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    if name == "GlmMoeDsaForCausalLM" and is_before("megatron-bridge", "0.6"):
        pytest.skip("Bridge 0.5 reads a name that transformers has changed in this model's configuration")
    source = str(tmp_path / "original")
    assert bridge_ranks.run(runs.write_model, name, source, ranks=1) == [True]
    bridge_ranks.run(runs.convert_without_cuda, source, str(tmp_path), ["--tp", "2"], ranks=2)
    assert runs.differences(source, str(tmp_path / "exported"), exact=True) == []

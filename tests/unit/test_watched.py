# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What torch counts of changes to a tensor, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mbridge_fsdp_ckpt.errors import ChangedTensorError
from mbridge_fsdp_ckpt.live.watched import Watched

Change = Callable[[torch.nn.Parameter], object]


def without_gradients(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1)


def by_loading(parameter: torch.nn.Parameter) -> None:
    module = torch.nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": torch.ones(4)})


def by_descent(parameter: torch.nn.Parameter) -> None:
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=0.5).step()


def by_swap(parameter: torch.nn.Parameter) -> None:
    parameter.data = torch.zeros(4)


SEEN: list[Change] = [
    without_gradients,
    by_loading,
    by_descent,
    lambda parameter: parameter.detach().mul_(2),
    lambda parameter: parameter.detach().view(2, 2)[0].zero_(),
]
NOT_SEEN: list[Change] = [
    lambda parameter: parameter.sum().backward(),
    lambda parameter: setattr(parameter, "requires_grad", False),
    lambda parameter: parameter.data.add_(1),  # the limit of what torch counts
    lambda parameter: parameter.detach().numpy().fill(0),
    by_swap,
]


@pytest.mark.parametrize("change", SEEN)
def test_what_changes_a_tensor_in_place_is_seen(change: Change) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    watched = Watched([torch.zeros(1), parameter])
    watched.check(parameter, "weight")
    change(parameter)
    with pytest.raises(ChangedTensorError, match=r"weight\] .* changed in place 1 times"):
        watched.check(parameter, "weight")


@pytest.mark.parametrize("change", NOT_SEEN)
def test_what_torch_does_not_count_is_not_seen(change: Change) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    watched = Watched([parameter])
    change(parameter)
    watched.check(parameter, "weight")


def test_another_tensor_is_none_of_those_that_there_were() -> None:
    with pytest.raises(ChangedTensorError, match="another one in its place"):
        Watched([torch.ones(4)]).check(torch.ones(4), "weight")


def test_tensors_made_for_inference_count_nothing() -> None:
    with torch.inference_mode():
        made = torch.ones(4)
    plain = torch.ones(4)
    watched = Watched([made, plain])
    watched.check(made, "buffer")
    plain.add_(1)
    with pytest.raises(ChangedTensorError):
        watched.check(plain, "weight")

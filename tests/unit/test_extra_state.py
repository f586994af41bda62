# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""FP8 state as data: what is collected, how experts are cut, and what a load refuses before it changes anything."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mbridge_fsdp_ckpt.errors import LayoutError, UnsupportedVersionError
from mbridge_fsdp_ckpt.format.values import decode, encode
from mbridge_fsdp_ckpt.live.fp8 import state as extra_state
from tests.extra_state import restore

HISTORY = 4
EXPERTS = "module.decoder.layers.0.mlp.experts.linear_fc1"


class Format(enum.Enum):
    """As Transformer Engine's."""

    HYBRID = 1
    E4M3 = 2


@dataclasses.dataclass
class DelayedScaling:
    """As Transformer Engine's, with fewer fields."""

    fp8_format: Format = Format.HYBRID
    amax_history_len: int = HISTORY
    amax_compute_algo: str | Callable[..., Any] = "max"
    reduce_amax: bool = True

    def delayed(self) -> bool:
        """Whether it is delayed scaling."""
        return True


class CurrentScaling(DelayedScaling):
    """A recipe without state."""

    def delayed(self) -> bool:
        """Whether it is delayed scaling."""
        return False


class Linear(nn.Module):
    """A module with the attributes of Transformer Engine's that count, after or before its first forward pass."""

    def __init__(self, gemms: int = 1, recipe: Any = None, ran: bool = True, history: int = HISTORY) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        if ran:
            self.fp8_meta |= {"recipe": recipe or DelayedScaling(), "num_gemms": gemms}
            for way, tensors in (("scaling_fwd", 3 * gemms), ("scaling_bwd", 2 * gemms)):
                self.fp8_meta[way] = SimpleNamespace(
                    scale=torch.rand(tensors), amax_history=torch.rand(history, tensors)
                )


class Grouped(Linear):
    """A module of grouped experts."""

    def __init__(self, gemms: int, **settings: Any) -> None:
        super().__init__(gemms, **settings)
        self.num_gemms = gemms


@pytest.fixture(autouse=True)
def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_state, "require", lambda package: None)
    monkeypatch.setattr(extra_state, "_recipe_from", lambda key, state: None)


def through_json(states: dict[str, Any]) -> Any:
    return decode(json.loads(json.dumps(encode(states))))


def numbered(first: int) -> Callable[[str], str]:
    """Names on disk, where this rank's first expert has that number."""

    def number(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + first}"

    return lambda name: re.sub(r"(\.weight|local_experts\.)(\d+)", number, name)


def tensors_of(module: Linear) -> list[torch.Tensor]:
    states = [module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]]
    return [tensor for state in states for tensor in (state.scale, state.amax_history)]


def same(one: Linear, other: Linear) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_modules_without_state_give_nothing() -> None:
    stateless = Linear(recipe=CurrentScaling())
    stateless.fp8_meta |= {"scaling_fwd": SimpleNamespace(), "scaling_bwd": SimpleNamespace()}
    modules = [("a", nn.Linear(2, 2)), ("b", Linear(ran=False)), ("c", stateless)]
    assert extra_state.collect(modules) == {}
    assert extra_state.find_restorations(modules, {}) == []
    assert not extra_state.may_have_some(module for _, module in modules)


def test_state_returns_bit_for_bit_in_place() -> None:
    saved, live = Linear(), Linear()
    views = [tensor.view(-1)[:1] for tensor in tensors_of(live)]
    states = through_json(extra_state.collect([("x", saved)]))
    assert list(states) == ["x._extra_state"]
    assert states["x._extra_state"]["recipe"] == {
        "class": "DelayedScaling",
        "fp8_format": "HYBRID",
        "amax_history_len": HISTORY,
        "amax_compute_algo": "max",
        "reduce_amax": True,
    }
    restore([("x", live)], states)
    assert same(saved, live)
    assert all(torch.equal(v, t.view(-1)[:1]) for v, t in zip(views, tensors_of(saved), strict=True))
    assert live.fp8_meta["fp8_checkpoint"]


def test_what_is_collected_does_not_change_afterwards() -> None:
    module = Linear()
    state = extra_state.collect([("x", module)])["x._extra_state"]
    before = state["scale_fwd"].clone()
    module.fp8_meta["scaling_fwd"].scale.zero_()
    assert torch.equal(state["scale_fwd"], before)


def test_a_function_in_a_recipe_is_left_out() -> None:
    states = extra_state.collect([("x", Linear(recipe=DelayedScaling(amax_compute_algo=torch.max)))])
    assert "amax_compute_algo" not in through_json(states)["x._extra_state"]["recipe"]


def test_another_transformer_engine_is_refused_where_there_is_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = extra_state.collect([("x", Linear())])

    def refuse(need: str) -> None:
        raise UnsupportedVersionError(expected="another", found=need, remedy="Install it.")

    monkeypatch.setattr(extra_state, "require", refuse)
    assert extra_state.collect([("x", Linear(ran=False)), ("y", nn.Linear(2, 2))]) == {}
    with pytest.raises(UnsupportedVersionError):
        extra_state.collect([("x", Linear())])
    with pytest.raises(UnsupportedVersionError):
        extra_state.find_restorations([("x", Linear())], states)


def test_grouped_experts_move_to_other_ranks() -> None:
    saved = [Grouped(4), Grouped(4)]
    states: dict[str, Any] = {}
    for rank, module in enumerate(saved):
        states |= through_json(extra_state.collect([(EXPERTS, module)], numbered(4 * rank)))
    assert sorted(states) == [f"{EXPERTS}._extra_state{expert}" for expert in range(8)]
    for rank in range(4):
        live = Grouped(2)
        restore([(EXPERTS, live)], states, numbered(2 * rank))
        origin, column = saved[rank // 2], 2 * (rank % 2)
        for ours, theirs in zip(tensors_of(live), tensors_of(origin), strict=True):
            width = theirs.shape[-1] // 4
            assert torch.equal(ours, theirs[..., column * width : (column + 2) * width])


def test_sequential_experts_are_numbered_globally() -> None:
    name = "module.layers.0.mlp.experts.local_experts.1.linear_fc2"
    states = extra_state.collect([(name, Linear())], numbered(6))
    assert list(states) == ["module.layers.0.mlp.experts.local_experts.7.linear_fc2._extra_state"]


@pytest.mark.parametrize(("saved", "live"), [(6, HISTORY), (2, HISTORY)])
def test_a_history_of_another_length_is_cut_or_padded(saved: int, live: int) -> None:
    source, target = Linear(history=saved), Linear(history=live)
    restore([("x", target)], extra_state.collect([("x", source)]))
    history = target.fp8_meta["scaling_fwd"].amax_history
    common = min(saved, live)
    assert torch.equal(history[:common], source.fp8_meta["scaling_fwd"].amax_history[:common])
    assert not history[common:].any()


def spoiled(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    states = extra_state.collect([("x", Linear())])
    change(states["x._extra_state"])
    return states


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field too many": lambda s: s.update(more=torch.zeros(1)),
    "a field too few": lambda s: s.pop("scale_bwd"),
    "no recipe": lambda s: s.pop("recipe"),
    "another recipe": lambda s: s["recipe"].update({"class": "os.system"}),
    "another dtype": lambda s: s.update(scale_fwd=s["scale_fwd"].double()),
    "no tensor": lambda s: s.update(scale_fwd="abc"),
    "an array": lambda s: s.update(amax_history_fwd=s["amax_history_fwd"].numpy()),
    "a scalar": lambda s: s.update(amax_history_fwd=torch.zeros(())),
    "nothing": lambda s: s.update({name: torch.zeros(0) for name in s if name != "recipe"}),
    "unlike lengths": lambda s: s.update(amax_history_bwd=torch.zeros(HISTORY + 1, 2)),
    "unlike widths": lambda s: s.update(scale_bwd=torch.zeros(3)),
    "two GEMMs": lambda s: s.update({n: torch.cat([t, t], -1) for n, t in s.items() if n != "recipe"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_state_changes_nothing(wrong: str) -> None:
    good, bad = Linear(), Linear()
    before = [tensor.clone() for module in (good, bad) for tensor in tensors_of(module)]
    states = extra_state.collect([("good", Linear())]) | spoiled(WRONG[wrong])
    with pytest.raises(LayoutError, match=r"x\._extra_state"):
        restore([("good", good), ("x", bad)], states)
    after = [tensor for module in (good, bad) for tensor in tensors_of(module)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("typed", [None, [], "x", 3, {}])
def test_state_that_is_no_mapping_of_state_is_refused(typed: Any) -> None:
    with pytest.raises(LayoutError):
        extra_state.check("x", typed)


def test_experts_of_a_module_need_state_alike() -> None:
    states = extra_state.collect([(EXPERTS, Grouped(2))])
    with pytest.raises(LayoutError, match="_extra_state1"):
        extra_state.find_restorations([(EXPERTS, Grouped(2))], {key: states[key] for key in list(states)[:1]})
    states[f"{EXPERTS}._extra_state1"]["recipe"] = {"class": "DelayedScaling", "margin": 1}
    with pytest.raises(LayoutError, match="_extra_state1"):
        extra_state.find_restorations([(EXPERTS, Grouped(2))], states)


def configured(fp8: str | None, recipe: str = "delayed") -> Linear:
    module = Linear(ran=False)
    module.config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    "live",
    [
        configured(None),
        configured("hybrid", "tensorwise"),
        configured("e4m3"),
        Linear(recipe=CurrentScaling()),
        Linear(recipe=DelayedScaling(fp8_format=Format.E4M3)),
    ],
)
def test_a_model_without_use_for_the_state_ignores_it(live: Linear, caplog: pytest.LogCaptureFixture) -> None:
    states = extra_state.collect([("x", Linear())])
    with caplog.at_level(logging.WARNING):
        assert extra_state.find_restorations([("x", live)], states) == []
    assert "saved FP8 state of 1 modules is ignored" in caplog.text


def test_a_model_that_finds_no_state_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        modules = [("a", configured("hybrid")), ("b", Linear()), ("c", configured(None))]
        assert extra_state.find_restorations(modules, {}) == []
    assert "the FP8 scales of 2 modules start fresh" in caplog.text


def test_state_kept_elsewhere_is_named(caplog: pytest.LogCaptureFixture) -> None:
    custom, fused, mixed = Linear(recipe=CurrentScaling()), nn.Module(), Linear()
    fused._fp8_metas = {"forward": {"recipe": DelayedScaling()}, "backward": None}  # type: ignore[assignment]
    mixed.fp8_meta["scaling_bwd"].scale = torch.ones(4)
    assert all(extra_state.may_have_some([module]) for module in (custom, fused, mixed))
    with caplog.at_level(logging.WARNING):
        assert extra_state.collect([("custom", custom), ("fused", fused), ("mixed", mixed)]) == {}
    assert "FP8 state of 3 modules is not saved, such as that of custom" in caplog.text


def test_open_rows_of_all_ranks_meet_in_their_maximum() -> None:
    module, idle = Linear(), Linear()
    for state in (idle.fp8_meta["scaling_fwd"], idle.fp8_meta["scaling_bwd"]):
        state.amax_history[0] = 0
    states = extra_state.collect([("x", module), ("idle", idle)])
    rows = through_json(extra_state.open_rows(states))
    assert list(rows) == ["x._extra_state"]
    larger = {way: row + torch.tensor([1.0, -1.0, 0.0])[: len(row)] for way, row in rows["x._extra_state"].items()}
    state = states["x._extra_state"]
    merged = extra_state.with_open_rows("x._extra_state", state, [rows["x._extra_state"], larger])
    expected = torch.maximum(state["amax_history_fwd"][0], larger["fwd"])
    assert torch.equal(merged["amax_history_fwd"][0], expected)
    assert torch.equal(merged["amax_history_fwd"][1:], state["amax_history_fwd"][1:])
    for wrong in ({}, None, {"fwd": torch.zeros(3)}, {"fwd": torch.zeros(4), "bwd": torch.zeros(2)}):
        with pytest.raises(LayoutError):
            extra_state.with_open_rows("x._extra_state", state, [wrong])


@pytest.mark.parametrize(("reduced", "ranks", "agree"), [(True, 1, True), (False, 1, True), (False, 2, False)])
def test_amaxes_that_are_not_reduced_are_each_ranks_own(reduced: bool, ranks: int, agree: bool) -> None:
    assert extra_state.replicas_agree(Linear(recipe=DelayedScaling(reduce_amax=reduced)), ranks) is agree

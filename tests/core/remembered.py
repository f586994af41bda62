"""What a save beside the training looks up after its call, while the model computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.live import planned
from mbridge_fsdp_ckpt.live.planned import Remembered
from mbridge_fsdp_ckpt.saving.snapshot import Prepared, Seen, look, plan_save
from mbridge_fsdp_ckpt.testing.models import Recipe
from tests.core import cases
from tests.core.replanned import Saves, changes, changing


def _call(saves: Saves) -> Seen:
    """What a call sees, with copies of buffers."""
    return look(saves.trainable.model, saves.trainable.optimizer, None, None, beside=True).held_still()


def _contents(prepared: Prepared) -> dict[str, Any]:
    """Keys, blocks and checksums."""
    holdings = prepared.holdings
    digests = prepared.elements.digests(range(len(holdings)))
    return {item.key: (item.entry, item.piece.box, digest) for item, digest in zip(holdings, digests, strict=True)}


def _in_full(saves: Saves) -> dict[str, Any]:
    """What a look at all of the model saves, without anything that is known of it."""
    planned._known.pop(saves.module, None)
    return _contents(plan_save(look(saves.trainable.model, saves.trainable.optimizer, None, None)))


def forwards() -> dict[str, Any]:
    """A call, and a forward and backward pass before the rest is seen: buffers are changed, and one replaced."""
    saves = Saves(cases.prepared(Recipe(layers=1, experts=2), steps=1))
    module = saves.module
    module.register_buffer("counted", torch.zeros(2))
    module.register_buffer("replaced", torch.zeros(2))
    saves.save()
    wanted = _in_full(saves)
    seen = _call(saves)
    with patch.object(saves.trainable.optimizer, "step"):
        saves.trainable.step(1)
    module.counted += 1
    module.replaced = torch.ones(3)
    found, later = _contents(plan_save(seen)), _call(saves)
    return {
        "remembered": isinstance(seen.tensors, Remembered),
        "as at the call": found == wanted,
        "buffers": len([key for key in found if key.endswith(("counted", "replaced"))]),
        "another shape": isinstance(later.tensors, Remembered),
        "then": _contents(plan_save(later)) == _in_full(saves),
    }


def trains_on() -> dict[str, int]:
    """Looks of a thread while another one trains: Megatron-FSDP exchanges parameters in their modules meanwhile."""
    saves = Saves(cases.prepared(Recipe(layers=1, experts=2), steps=1))
    saves.save()
    seen = _call(saves)
    wanted, ended, looks, errors = len(seen.tensors.each()), threading.Event(), list[int](), list[BaseException]()

    def look_on() -> None:
        try:
            while not ended.is_set():
                looks.append(len(seen.tensors.each()))
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many turns as can be
    try:
        looking = threading.Thread(target=look_on)
        looking.start()
        for number in range(10):
            saves.trainable.step(number)
            saves.module.state_dict(keep_vars=True)  # one exchange more
    finally:
        ended.set()
        looking.join()
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return {"looks": len(looks), "differing": len([count for count in looks if count != wanted])}


def changed() -> dict[str, tuple[str, bool]]:
    """By what changed in a model: what became of the next save, and whether it, or the one after, has all there is."""
    saves = Saves(cases.prepared(Recipe(layers=1, experts=2), steps=1))
    saves.save()
    router = saves.part(".router")
    more: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a buffer's values": lambda: setattr(router, "found", torch.ones(3)),
        "a buffer in a dictionary": lambda: router._buffers.update(put=torch.zeros(2)),
        "a buffer that is deleted": lambda: delattr(router, "late"),
        "a module that is deleted": lambda: delattr(_with_child(router), "child"),
    }
    with changing():
        return {what: _after(change, saves) for what, change in (changes(saves) | more).items()}


def _after(change: Callable[[], object], saves: Saves) -> tuple[str, bool]:
    change()
    seen = _call(saves)
    outcome = "seen later" if isinstance(seen.tensors, Remembered) else "seen"
    try:
        saved = plan_save(seen)
    except CheckpointError as error:
        outcome, seen = type(error).__name__, _call(saves)
        if isinstance(seen.tensors, Remembered):
            return "refused, and remembered", False
        saved = plan_save(seen)
    return outcome, _contents(saved) == _in_full(saves)


def _with_child(part: Any) -> Any:
    part.child = torch.nn.Identity()
    return part

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of VeRL's asynchronous saves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mbridge_fsdp_ckpt import checkpoint
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from mbridge_fsdp_ckpt.saving.background.filling import Filling
from tests.models.imported import gloo_gathers_uneven
from tests.verl import tiny
from tests.verl.tiny import Setup


def resumed(setup: Setup) -> tuple[Any, int]:
    """An engine where VeRL's tracker says a run stands, as its PPO trainers find that, and the step."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    engine, latest = tiny.build(setup), find_latest_ckpt_path(setup.directory)
    if latest is None:
        return engine, 0
    engine.load_checkpoint(f"{latest}/actor")
    return engine, int(latest.rpartition("_")[2])


def save(setup: Setup, engine: Any, number: int, keep: int | None = None) -> None:
    """As VeRL's PPO trainers ask for it."""
    with gloo_gathers_uneven():
        engine.save_checkpoint(f"{setup.directory}/global_step_{number}/actor", None, number, keep)


def train(setup: Setup, steps: int, keep: int | None = None) -> dict[str, Any]:
    """Resume, and save after every step."""
    engine, done = resumed(setup)
    losses = {}
    for number in range(done + 1, steps + 1):
        losses[number] = tiny.step(engine, number)
        save(setup, engine, number, keep)
    return {"from": done, "losses": losses, "end": tiny.snapshot(engine).digests()}


def die_before_the_commit(setup: Setup) -> None:
    """The second save has returned and is not committed when the job is killed."""
    engine, _ = resumed(setup)
    tiny.step(engine, 1)
    save(setup, engine, 1)
    checkpoint.finish_saves()
    writer = async_saves()._writer
    assert writer is not None
    os.kill(writer.pid, signal.SIGSTOP)
    tiny.step(engine, 2)
    save(setup, engine, 2)
    os.kill(writer.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def errors_of_two_saves(setup: Setup) -> list[str]:
    """What each of two saves raises."""
    engine, errors = tiny.build(setup), []
    for number in (1, 2):
        try:
            save(setup, engine, number)
        except CheckpointError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def taken_around_a_move(setup: Setup) -> tuple[bool, bool]:
    """Whether a slow copy has ended before and after VeRL moves what it has to the host."""
    from verl.workers.engine.megatron import transformer_impl

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        add(*arguments)

    engine, add = tiny.build(setup), Filling.add
    with patch.object(Filling, "add", slow):
        save(setup, engine, 1)
        saving = async_saves()._saving
        assert saving is not None
        before = saving.taken
        transformer_impl.offload_megatron_model_to_cpu([])
        after = saving.taken
    checkpoint.finish_saves()
    return before, after


def save_a_critic(setup: Setup) -> bool:
    """Whether a critic's checkpoint is there as soon as its save has returned."""
    engine, place = tiny.build(setup.on(model_type="value_model")), f"{setup.directory}/global_step_1/critic"
    with gloo_gathers_uneven():
        engine.save_checkpoint(place, None, 1, None)
    return (Path(place) / "model" / "dist_ckpt" / "manifest.json").is_file() and async_saves()._saving is None

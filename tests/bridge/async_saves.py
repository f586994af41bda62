# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of Bridge's `async_save`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import Settings
from mbridge_fsdp_ckpt.commit import removal
from mbridge_fsdp_ckpt.integrations.common import pending
from mbridge_fsdp_ckpt.saving.background.async_saves import async_saves
from testing.ranks import no_process_group
from tests.bridge.training import Run, train
from tests.patched import patched


@no_process_group
def train_watched(run: Run) -> dict[str, Any]:
    """Train; also at which steps all ranks heard of a save, and whether processes are left or Bridge started some."""
    heard, queues = _Heard(), []
    heard.callbacks.register("on_train_end", lambda context: queues.append(context.state.async_calls_queue))
    found = train(run, heard.callbacks)
    assert removal.wait(30.0)
    return found | {
        "heard": heard.steps,
        "queues": queues,
        "writer": async_saves()._writer,
        "pending": pending._pending,
    }


@no_process_group
def train_held(run: Run, settings: Settings, until: int) -> dict[str, Any]:
    """Train, while the first save cannot end before the step after `until` begins, and has ended when that does.

    Returns:
        At which steps ranks heard of saves, and what each of them says of the step that it is at.
    """
    heard, held = _Heard(), threading.Event()

    def free(context: Any) -> None:
        if context.state.train_state.step == until:
            held.set()

    def wait(context: Any) -> None:
        if held.is_set() and pending._pending is not None:
            pending._pending.saving.wait()

    heard.callbacks.register("on_train_step_start", free)
    heard.callbacks.register("on_train_step_end", wait)
    mbridge_fsdp_ckpt.register(settings)
    try:
        with _held(held):
            train(run, heard.callbacks)
    finally:
        mbridge_fsdp_ckpt.unregister()
    return {"heard": heard.steps}


@no_process_group
def train_where_one_hears_late(run: Run) -> list[list[int]]:
    """Train, while rank 1 hears seconds after rank 0 that a save has ended; at which steps ranks heard of it.

    Saves are followed up as in a loop of one's own, which calls Bridge's function.
    """
    from megatron.bridge.training import checkpointing

    heard = _Heard()

    def own_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        def finalize(manager: Any, state: Any, **how: bool) -> None:
            checkpointing.maybe_finalize_async_save(state, manager.checkpoint_config, **how)

        return finalize

    def wait(context: Any) -> None:
        if dist.get_rank() == 0 and pending._pending is not None:
            pending._pending.saving.wait()

    heard.callbacks.register("on_train_step_end", wait)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any) -> None:
            time.sleep(4.0 if dist.get_rank() == 1 else 0.0)
            function(*args)

        return end

    finalizes = "mbridge_fsdp_ckpt.integrations.bridge.manager:SafeCheckpointManager.finalize_async_saves"
    with patched("mbridge_fsdp_ckpt.saving.background.handle:SaveHandle._end", late), patched(finalizes, own_loop):
        train(run, heard.callbacks)
    return heard.steps


@no_process_group
def train_and_stop_saving(run: Run) -> list[list[int]]:
    """Train, and want no more saves while the first one goes on; at which steps ranks heard of one."""
    heard, held = _Heard(), threading.Event()

    def stop(context: Any) -> None:
        if context.state.train_state.step == 1:  # the second step is about to be counted
            context.state.cfg.checkpoint.save = None
            held.set()

    heard.callbacks.register("on_train_step_end", stop)
    with _held(held):
        train(run, heard.callbacks)
    return heard.steps


@no_process_group
def train_with_an_obstacle(run: Run) -> None:
    """Train, and let a file lie where a directory on the way to the second save should be."""
    heard = _Heard()

    def obstruct(context: Any) -> None:
        if dist.get_rank() == 0 and context.state.train_state.step == 1:  # the second step is about to be counted
            Path(run.directory, "iter_0000002").write_text("no directory")

    heard.callbacks.register("on_train_step_end", obstruct)
    train(run, heard.callbacks)


@no_process_group
def train_until_exit(run: Run, signal: int | None) -> dict[str, Any]:
    """Train until Bridge ends the process; see `train_watched`."""
    heard = _Heard()

    def send(context: Any) -> None:
        if signal is not None and dist.get_rank() == 0 and context.state.train_state.step == 1:
            os.kill(os.getpid(), signal)

    heard.callbacks.register("on_train_step_end", send)
    try:
        train(run, heard.callbacks)
    except SystemExit:
        return {"heard": heard.steps, "writer": async_saves()._writer, "pending": pending._pending}
    raise AssertionError("went on to the end")


class _Heard:
    """A callback that talks to the other ranks each time that a save has ended."""

    def __init__(self) -> None:
        from megatron.bridge.training.callbacks import CallbackManager

        self.steps: list[list[int]] = []
        self.callbacks = CallbackManager()
        self.callbacks.register("on_checkpoint_save", self._hear)

    def _hear(self, context: Any) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, context.state.train_state.step)
        self.steps.append(found)


@contextmanager
def _held(event: threading.Event) -> Iterator[None]:
    """Storage that takes its time: rank 0's run files are not written before that."""

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> None:
            assert event.wait(60.0)
            function(*args)

        return write

    with patched("mbridge_fsdp_ckpt.integrations.bridge.run_files:_write_run_files", slow):
        yield

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of VeRL's engine."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError, KeyMismatchError
from mbridge_fsdp_ckpt.format.payload import PayloadWriter
from tests.applied import Applied, applied_numbers
from tests.models.imported import gloo_gathers_uneven
from tests.verl import tiny
from tests.verl.tiny import Setup, Snapshot

CONTENTS = ("model", "optimizer", "extra", "hf_model")
SUBSETS = [subset for n in range(len(CONTENTS) + 1) for subset in itertools.combinations(CONTENTS, n)]


def train(setup: Setup, steps: int, save_at: tuple[int, ...] = (), keep: int | None = None) -> dict[str, Any]:
    """Resume as VeRL's SFT trainer does, and train on; losses by step, and what is there before and at the end."""
    engine = tiny.build(setup)
    run = tiny.handler(setup, engine, keep)
    done = run.load_checkpoint()
    resumed, position = tiny.snapshot(engine).digests(), run.train_dataloader.position
    losses = {}
    for number in range(done + 1, steps + 1):
        losses[number] = tiny.step(engine, number)
        if number in save_at:
            run.train_dataloader.position = number
            with gloo_gathers_uneven():
                run.save_checkpoint(number)
    return {
        "from": done,
        "position": position,
        "losses": losses,
        "resumed": resumed,
        "end": tiny.snapshot(engine).digests(),
        "optimizer": type(engine.optimizer.optimizer).__name__,
    }


def resume_each(first: Setup, steps: int, others: list[tuple[Setup, bool]]) -> list[list[Applied]]:
    """Train and save, then two steps of each other run from there; what the steps of each were handed.

    Of each other run: whether VeRL's checkpoint manager has its scheduler.
    """
    found = []
    for setup, scheduled in ((first, True), *others):
        engine = tiny.build(setup)
        run = tiny.handler(setup, engine)
        if not scheduled:
            engine.checkpoint_mananager.lr_scheduler = None
        done = run.load_checkpoint()
        with applied_numbers() as applied:
            for number in range(done + 1, done + 1 + (2 if done else steps)):
                tiny.step(engine, number)
        found.append(list(applied))
        if not done:
            with gloo_gathers_uneven():
                run.save_checkpoint(steps)
    return found


def resume_where_ranks_see_different_things(setup: Setup, other: str) -> list[str]:
    """What the SFT trainer's resume says, and a load of a given path, where the last rank sees another state."""
    engine = tiny.build(setup)
    run = tiny.handler(setup, engine)
    path = f"{setup.directory}/global_step_2"
    if torch.distributed.get_rank():
        run.default_local_dir, path = other, f"{other}/global_step_2"
    said = []
    for action in (run.load_checkpoint, partial(engine.load_checkpoint, path)):
        try:
            said.append(f"went on: {action()}")
        except CheckpointError as error:
            said.append(str(error))
    return said


def die_in_a_save(setup: Setup, steps: int, save_at: tuple[int, ...], chunks: int) -> None:
    """Like `train`; in the last save every rank is killed after it wrote some chunks."""
    add, calls = PayloadWriter.add_pieces, itertools.count(1)

    def mortal(writer: PayloadWriter, *args: Any) -> Any:
        written = add(writer, *args)
        if tiny.sharded(setup, save_at[-1]).parent.exists() and next(calls) == chunks:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with patch.object(PayloadWriter, "add_pieces", mortal):
        train(setup, steps, save_at)


def every_combination(setup: Setup, pairs: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Save each combination of contents, load the given pairs of saved and wanted; what was not as it should be.

    State A is saved.  Before each load, the engine is in state B.
    """
    engine = tiny.build(setup)
    manager = engine.checkpoint_mananager
    tiny.step(engine, 1)
    first = tiny.snapshot(engine)
    for contents in SUBSETS:
        manager.checkpoint_save_contents = list(contents)
        with gloo_gathers_uneven():
            engine.save_checkpoint(_place(setup, contents), global_step=1)
    tiny.step(engine, 2)
    second = tiny.snapshot(engine)
    wrong = []
    for saved, wanted in pairs:
        tiny.put_back(engine, second)
        manager.checkpoint_load_contents = list(wanted)
        error = _error_of(partial(engine.load_checkpoint, _place(setup, saved)))
        defects = list(_defects(tiny.snapshot(engine), first, second, saved, wanted, error))
        wrong += [f"saved {saved}, load {wanted}: {defect}" for defect in defects]
    return wrong


def _place(setup: Setup, contents: tuple[str, ...]) -> str:
    return f"{setup.directory}/{'+'.join(contents) or 'nothing'}/global_step_1"


def _error_of(action: Callable[[], None]) -> str:
    try:
        action()
    except CheckpointError as error:
        in_verls_words = "What is read follows checkpoint.load_contents." in error.remedy
        if isinstance(error, KeyMismatchError) and error.key is None and not in_verls_words:
            return error.remedy
        return type(error).__name__
    return ""


def _expected_error(saved: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    """VeRL exports with "model", too; and weights come from the export only where "model" is not loaded."""
    exported = "model" in saved or "hf_model" in saved
    if "hf_model" in wanted and "model" not in wanted and not exported:
        return "NotACheckpointError"
    in_shards = set(wanted) - {"hf_model"}
    if in_shards and not set(saved) - {"hf_model"}:
        return "NotACheckpointError"
    return "KeyMismatchError" if in_shards - set(saved) else ""


def _defects(
    now: Snapshot, first: Snapshot, second: Snapshot, saved: tuple[str, ...], wanted: tuple[str, ...], error: str
) -> Iterator[str]:
    expected = _expected_error(saved, wanted)
    if error != expected:
        yield f"{error or 'no error'} instead of {expected or 'none'}"
        return
    loaded = () if error else wanted
    rounded = "hf_model" in loaded and "model" not in loaded
    weights = first if "model" in loaded or rounded else second
    state = first if "optimizer" in loaded else second
    for name, tensor in now.tensors.items():
        source = state if name.startswith("slot.") else weights
        same = torch.equal(tensor, source.tensors[name])
        if not (same or (rounded and source is first and _rounds_to(tensor, source.tensors[name]))):
            yield f"{name} is not that of state {'A' if source is first else 'B'}"
    digests = now.digests()
    if digests["schedule"] != state.digests()["schedule"]:
        yield "the schedule"
    if digests["numbers"] != (first if "extra" in loaded else second).digests()["numbers"]:
        yield "random numbers"
    if weights is first and all(torch.equal(first.tensors[n], second.tensors[n]) for n in first.tensors):
        yield "states A and B are the same: the test shows nothing"


def _rounds_to(exported: torch.Tensor, saved: torch.Tensor) -> bool:
    """An export has 16 bits; norms that Bridge moves by one lose some of them on the way."""
    return bool(torch.allclose(exported.float(), saved.float(), rtol=2**-7, atol=2**-8))


def export_untrained(setup: Setup) -> None:
    """The export of a model as it was imported."""
    engine = tiny.build(setup)
    with gloo_gathers_uneven():
        engine.save_checkpoint(setup.directory, global_step=0)


def load_export(directory: str) -> dict[str, Any]:
    """What transformers says of an export: keys it misses or does not know, and logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor([AutoTokenizer.from_pretrained(directory)("w1 w2 w3 w4 w5")["input_ids"]])
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "logits": logits,
    }


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def directories(setup: Setup) -> dict[str, list[str]]:
    """Files of each sharded checkpoint of a run."""
    return {step.name: _files(step / "model" / "dist_ckpt") for step in sorted(Path(setup.directory).glob("global_*"))}

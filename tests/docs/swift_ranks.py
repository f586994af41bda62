# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What ranks do with the file on the page about ms-swift.

ms-swift is not installed: one module stands in for it, with the two functions that ms-swift 4.6.0 has there, of the
same parameters.  Everything else is the real thing.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import re
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from mbridge_fsdp_ckpt.errors import CheckpointError
from testing.kernels import replace_cuda_only_kernels
from testing.models import Recipe, Trainable, build
from tests.core import oracle
from tests.patched import patched

PAGE = Path(__file__).parents[2] / "docs" / "swift.md"
TRAINER = "swift.megatron.trainers.base"
MODEL = Recipe(layers=1, experts=4, offload=1.0, optimizer_settings={"min_lr": 0.0})
BATCH = 4


def stand_in() -> ModuleType:
    """What ms-swift's trainer has under the two names, as far as a caller sees."""

    def save_mcore_checkpoint(
        args: Any,
        models: Any,
        optimizer: Any = None,
        opt_param_scheduler: Any = None,
        iteration: int = 1,
        output_dir: str | None = None,
        peft_format: bool = False,
        async_finalize_fn: Any = None,
    ) -> Any:
        return "ms-swift's save", models, optimizer, opt_param_scheduler, iteration, output_dir, peft_format

    def load_mcore_checkpoint(
        args: Any,
        ddp_models: Any,
        optimizer: Any = None,
        opt_param_scheduler: Any = None,
        load_arg: str = "mcore_model",
        adapter_name: str = "default",
    ) -> Any:
        return "ms-swift's load", ddp_models, optimizer, opt_param_scheduler, load_arg, adapter_name

    module = ModuleType(TRAINER)
    vars(module).update(save_mcore_checkpoint=save_mcore_checkpoint, load_mcore_checkpoint=load_mcore_checkpoint)
    return module


@contextmanager
def plugged_in() -> Iterator[Any]:
    """The trainer's module, after the file on the page was executed as a plug-in."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    with patch.dict(sys.modules, {TRAINER: stand_in()}):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "swift_safe"})
        yield importlib.import_module(TRAINER)


def arguments(folder: str | Path, **others: Any) -> Namespace:
    """Those of ms-swift's that the two functions read; a run that resumes."""
    flags = dict.fromkeys(
        ("async_save", "fp16", "finetune", "no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng"), False
    )
    return Namespace(
        **{**flags, "use_megatron_fsdp": True, "tuner_type": "full", "output_dir": "", "mcore_model": str(folder)}
        | others
    )


@dataclass
class Run:
    """A trainer of ms-swift's, as far as checkpoints are concerned.

    On CPU ranks CUDA's generator is the CPU's.  Saves and loads see one of its own, so that each is seen to come back.
    """

    args: Namespace
    trainable: Trainable
    scheduler: Any
    device: torch.Generator

    @classmethod
    def begin(cls, folder: str, seed: int, recipe: Recipe = MODEL) -> Run:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        replace_cuda_only_kernels()
        trainable = build(recipe, seed)
        rates = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 0.0, "lr_decay_style": "cosine"}
        steps = {"lr_warmup_steps": BATCH, "lr_decay_steps": 9 * BATCH, "wd_incr_steps": 9 * BATCH}
        decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"}
        scheduler = OptimizerParamScheduler(trainable.optimizer, **rates, **steps, **decay)
        device = torch.Generator()
        for seed_one in (random.seed, np.random.seed, torch.manual_seed, device.manual_seed):
            seed_one(seed + 10 * dist.get_rank())
        return cls(arguments(folder, consumed_train_samples=0), trainable, scheduler, device)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            losses.append(self.trainable.step(number))
            self.scheduler.step(increment=BATCH)
            self.args.consumed_train_samples += BATCH
        return losses

    def save(self, trainer: Any, iteration: int) -> Any:
        """As ms-swift's trainer calls it."""
        with self._own_device_generator():
            return trainer.save_mcore_checkpoint(
                self.args,
                [self.trainable.model],
                self.trainable.optimizer,
                self.scheduler,
                iteration=iteration,
                peft_format=False,
                output_dir=self.args.mcore_model,
                async_finalize_fn=None,
            )

    def load(self, trainer: Any) -> Any:
        """As ms-swift's trainer calls it."""
        model, optimizer = self.trainable.model, self.trainable.optimizer
        with self._own_device_generator():
            return trainer.load_mcore_checkpoint(self.args, [model], optimizer, self.scheduler, load_arg="mcore_model")

    def _own_device_generator(self) -> Any:
        get, put = self.device.get_state, self.device.set_state
        return patch.multiple(torch.cuda, get_rng_state=lambda: get(), set_rng_state=lambda state: put(state))

    def state(self) -> dict[str, Any]:
        """All that a checkpoint brings back; it draws no random number."""
        tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
        return {
            "tensors": oracle.live(self.trainable),
            "schedule": self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.trainable.optimizer.param_groups],
            "samples": self.args.consumed_train_samples,
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
            "torch": oracle.digest(torch.get_rng_state()),
            "cuda": oracle.digest(self.device.get_state()),
            "tracked": {name: oracle.digest(state) for name, state in tracker.get_states().items()},
        }


def trained(folder: str) -> dict[str, Any]:
    """Two steps, a save, another of weights alone, two more steps."""
    with plugged_in() as trainer:
        run = Run.begin(folder, seed=1)
        run.train(0, 2)
        returned = run.save(trainer, 2)
        saved = run.state()
        run.args.mcore_model, run.args.no_save_optim, run.args.no_save_rng = f"{folder}/weights", True, True
        run.save(trainer, 2)
        return {"returned": returned, "saved": saved, "losses": run.train(2, 4), "end": run.state()}


def killed(folder: str) -> None:
    """One more step, and a save in which all ranks are killed just before the commit."""
    dying = Path(folder) / "dying"

    def die(*_: Any) -> None:
        dying.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def follow() -> None:
        while not dying.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    with plugged_in() as trainer:
        run = Run.begin(folder, seed=2)
        run.load(trainer)
        run.train(2, 3)
        if dist.get_rank():
            threading.Thread(target=follow, daemon=True).start()
        with patched("mbridge_fsdp_ckpt.commit.rename:put_in_place", lambda _: die):
            run.save(trainer, 3)


def resumed(folder: str) -> dict[str, Any]:
    """What is not there; weights alone, asked for in two ways; then everything, and two more steps."""
    with plugged_in() as trainer:
        run = Run.begin(folder, seed=3)
        found: dict[str, Any] = {"before": run.state()}
        run.args.mcore_model = f"{folder}/nothing"
        found["missing"] = error_of(lambda: run.load(trainer))
        run.args.mcore_model, run.args.finetune = folder, True
        found["fine-tuned"] = run.load(trainer), run.state()
        run.args.mcore_model, run.args.finetune = f"{folder}/weights", False
        found["stateless"] = error_of(lambda: run.load(trainer))
        run.args.no_load_optim = True
        found["weights"] = run.load(trainer), run.state()
        run.args.mcore_model, run.args.no_load_optim = folder, False
        found["returned"], found["loaded"] = run.load(trainer), run.state()
        return {**found, "losses": run.train(2, 4), "end": run.state()}


def saved_alone(folder: str) -> dict[str, Any]:
    """A step and a save on one rank."""
    with plugged_in() as trainer:
        run = Run.begin(folder, seed=1)
        run.train(0, 1)
        run.save(trainer, 1)
        return run.state()


def in_another_layout(folder: str, tensor: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there was before a load on more ranks, and after it."""
    with plugged_in() as trainer:
        run = Run.begin(folder, seed=2, recipe=MODEL.on(tensor=tensor, expert=tensor))
        before = run.state()
        run.load(trainer)
        return before, run.state()


def passed_on(folder: str) -> dict[str, Any]:
    """What goes to ms-swift's own functions, and what is refused."""
    (Path(folder) / "iter_0000000").mkdir()  # a checkpoint of ms-swift's: it has no manifest.json
    lora, plain = arguments(folder, tuner_type="lora"), arguments(folder, use_megatron_fsdp=False)
    unsupported = [arguments(f"{folder}/none", **{option: True}) for option in ("async_save", "fp16")]
    with plugged_in() as trainer:
        save, load, theirs = trainer.save_mcore_checkpoint, trainer.load_mcore_checkpoint, stand_in()
        return {
            "same": [
                [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
                for name in ("save_mcore_checkpoint", "load_mcore_checkpoint")
                for module in (trainer, theirs)
            ],
            "saves": [
                save(lora, ["model"], 1, 2, iteration=3, output_dir="here", peft_format=True),
                save(plain, ["model"], 1, 2, iteration=3, output_dir="here"),
                save(arguments(folder), [], 1, 2, iteration=3, output_dir="here"),
            ],
            "loads": [load(args, ["model"], 1, 2) for args in (lora, plain, arguments(folder))],
            "refused": [[error_of(partial(call, args, ["model"])) for call in (save, load)] for args in unsupported],
        }


def error_of(action: Callable[[], Any]) -> str:
    """The named error that is raised, with its name; empty without one."""
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""

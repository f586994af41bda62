# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A training job for several agents of torchrun: it resumes from the tracker and saves after each step, until told.

torchrun ... -m tests.core.elastic_nodes ROOT     the agent's environment names its NODE

ROOT/kill-NODE ends the worker of a node in the middle of a step, ROOT/stop all of them after one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from testing import cpu_cuda
from testing.models import Recipe

_PAUSE_S = 0.3  # a step: the saves of hundreds would prove the same


def main(root: Path, node: str) -> None:
    """Train; a line for each step whose checkpoint is committed, with what this worker knows of the job."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401 - before CUDA is replaced

    cpu_cuda.install()
    dist.init_process_group("gloo")
    import mbridge_fsdp_ckpt
    from mbridge_fsdp_ckpt.format.names import TRACKER
    from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
    from tests.core import cases
    from tests.soak.kill import save

    trainable, step = cases.prepared(Recipe(layers=1)), 0
    if (root / TRACKER).is_file():
        loaded = mbridge_fsdp_ckpt.load(find_checkpoint(root), model=trainable.model, optimizer=trainable.optimizer)
        step = loaded.values["iteration"]
    settings = mbridge_fsdp_ckpt.Settings(time_limit=20.0)
    while not _told_to_stop(root):
        step += 1
        trainable.step(step)
        if (root / f"kill-{node}").exists():
            (root / f"kill-{node}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        background = step % 2 == 0
        save(root, step, trainable, settings, background=background)
        time.sleep(_PAUSE_S)
        mbridge_fsdp_ckpt.finish_saves()
        _say(
            root, f"node {node} restart {os.environ['TORCHELASTIC_RESTART_COUNT']} world {dist.get_world_size()}", step
        )
    dist.destroy_process_group()


def _told_to_stop(root: Path) -> bool:
    """The same on all ranks."""
    stops = torch.tensor(int((root / "stop").exists()))
    dist.all_reduce(stops, op=dist.ReduceOp.MAX)
    return bool(stops)


def _say(root: Path, who: str, step: int) -> None:
    with (root / "log").open("a") as log:
        log.write(f"{who} step {step}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["NODE"])

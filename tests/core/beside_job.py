# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A training job of plain processes that ends while a save goes on beside it.

RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... python -m tests.core.beside_job ROOT HOW

HOW     raises      an exception that nobody catches
        waits       trains on until somebody interrupts it
        leaves      ends well, and leaves its process group as soon as it has asked for the save
        saves       trains on until SIGUSR1, on which it makes its last save
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from testing import cpu_cuda


def main(root: Path, how: str) -> None:
    """One save that ends well, so that the writers run; then one that the end of the process meets in the middle."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401 - before CUDA is replaced

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    cpu_cuda.install()
    dist.init_process_group("gloo")

    from tests.core import beside

    run = beside.Run(str(root), settings=beside.PATIENT)
    run.warm()
    dist.barrier()
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    run.writer(signal.SIGSTOP)
    run.save(**follow_ups(root, 2))
    together = dist.destroy_process_group if how == "leaves" else dist.barrier
    together()
    print("saving", flush=True)
    if how == "raises":
        raise RuntimeError("training diverged")
    if how == "waits":
        time.sleep(600)
    while how == "saves" and not told:
        time.sleep(0.05)
    if told:
        run.save(**follow_ups(root, 3))


def follow_ups(root: Path, number: int) -> dict[str, Callable[..., Any]]:
    """What a training process does for a save that goes on: a file of its own, and a tracker."""
    return {
        "add_files": lambda directory: (directory / "more").write_text("of the training process"),
        "after_commit": lambda: (root / "latest").write_text(str(number)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

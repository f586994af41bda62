# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A rank of a training job as a Ray actor, on the CPU."""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 200.0


class Trainer:
    """Runs one case in a process that VeRL's import alone has prepared, as it does its workers.

    Args:
        rank: Its rank.
        ranks: How many there are.
        port: Where rank 0 listens.
    """

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        import verl

        self.plugin_came_with_verl = "mbridge_fsdp_ckpt.integrations.verl" in sys.modules
        import torch.distributed as dist
        import transformer_engine.pytorch  # noqa: F401 - looks for CUDA while it is imported
        import verl.workers.engine.megatron.transformer_impl  # noqa: F401

        from testing import cleanup, cpu_cuda

        cpu_cuda.install()
        cleanup.seed()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        limit = datetime.timedelta(seconds=2 * LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=limit
        )

    def process(self) -> tuple[int, bool]:
        """Its id, and whether `import verl` loaded our plug-in."""
        return os.getpid(), self.plugin_came_with_verl

    def train(self, setup: Any, steps: int, save_at: tuple[int, ...], stacks: Path) -> dict[str, Any]:
        """See `cases.train`; an actor that hangs writes its stacks to a file and ends."""
        from tests.verl import cases

        with stacks.open("w") as file:
            faulthandler.dump_traceback_later(LIMIT_S, file=file, exit=True)
            try:
                return cases.train(setup, steps, save_at)
            finally:
                faulthandler.cancel_dump_traceback_later()

    def be_killed(self) -> None:
        """End at once."""
        os.kill(os.getpid(), signal.SIGKILL)

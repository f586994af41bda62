"""A training job for torchrun: it resumes from the tracker, saves after every step, and loses a rank in a save.

torchrun ... tests/core/elastic_job.py ROOT STEPS STEP     rank 1 is killed in STEP's save, the first time
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from mbridge_fsdp_ckpt.testing import cpu_cuda
from mbridge_fsdp_ckpt.testing.models import Recipe

RECIPE = Recipe(layers=1)


def main(root: Path, steps: int, deadly: int) -> None:
    """Train, and leave what was live at the end in ROOT/end.json."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter  # noqa: F401 - before CUDA is replaced

    cpu_cuda.install()
    dist.init_process_group("gloo")
    end = train(root, steps, deadly)
    if dist.get_rank() == 0:
        (root / "end.json").write_text(json.dumps(end, sort_keys=True))


def train(root: Path, steps: int, deadly: int = -1) -> dict[str, Any]:
    """Resume, and train: what is live at the end."""
    import mbridge_fsdp_ckpt
    from mbridge_fsdp_ckpt.hosts.root import TRACKER, find_checkpoint
    from mbridge_fsdp_ckpt.storage.format.payload import PayloadWriter
    from tests.core import cases, oracle
    from tests.soak.kill import save_and_publish

    trainable = cases.prepared(RECIPE)
    done, first_try = 0, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if (root / TRACKER).is_file():
        loaded = mbridge_fsdp_ckpt.load(find_checkpoint(root), model=trainable.model, optimizer=trainable.optimizer)
        done = loaded.values["iteration"]
    print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} begins after step {done}", flush=True)
    for number in range(done + 1, steps + 1):
        trainable.step(number)
        dies = number == deadly and first_try and dist.get_rank() == 1
        with patch.object(PayloadWriter, "add_pieces", _die if dies else PayloadWriter.add_pieces):
            save_and_publish(root, number, trainable)
    return oracle.live(trainable)


def _die(*arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

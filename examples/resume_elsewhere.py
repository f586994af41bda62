# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Resume a checkpoint on other ranks, and at another tensor-parallel size, than it was saved on.

torchrun --nproc-per-node 2 examples/native.py /scratch/checkpoints --steps 4
torchrun --nproc-per-node 4 examples/resume_elsewhere.py /scratch/checkpoints --tensor 2 --steps 6

Nothing is converted and nothing is said about the layout of either job.
"""

from __future__ import annotations

import torch.distributed as dist
from training import Job, begin, latest

import mbridge_fsdp_ckpt as ckpt


def main() -> None:
    """Go on from the latest checkpoint, and save nothing."""
    options = begin(__doc__)
    directory = latest(options.folder)
    if directory is None:
        raise SystemExit(f"no checkpoint in {options.folder}: run native.py or asynchronous.py first")
    job = Job(options.tensor, seed=2)
    loaded = ckpt.load(directory, model=job.model, optimizer=job.optimizer)
    if dist.get_rank() == 0:
        now = dict(zip(job.mesh.mesh_dim_names or (), job.mesh.shape, strict=True))
        print(f"{directory.name} is loaded on {now}", flush=True)
    for step in range(loaded.values["step"], options.steps):
        job.step(step)


if __name__ == "__main__":
    main()

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Save, and resume, in a training loop of one's own.

torchrun --nproc-per-node 2 examples/native.py /scratch/checkpoints --steps 4
torchrun --nproc-per-node 2 examples/native.py /scratch/checkpoints --steps 6    # goes on after step 4
"""

from __future__ import annotations

from functools import partial

from training import Job, begin, latest, name_latest, place

import mbridge_fsdp_ckpt as ckpt

EVERY = 2


def main() -> None:
    """Train to the last step, from the latest checkpoint if there is one."""
    options = begin(__doc__)
    job, done = Job(options.tensor), 0
    if (directory := latest(options.folder)) is not None:
        loaded = ckpt.load(directory, model=job.model, optimizer=job.optimizer)
        done = loaded.values["step"]
    for step in range(done + 1, options.steps + 1):
        job.step(step - 1)
        if step % EVERY == 0:
            ckpt.save(
                place(options.folder, step),
                model=job.model,
                optimizer=job.optimizer,
                values={"step": step},
                after_commit=partial(name_latest, options.folder, step),
            )


if __name__ == "__main__":
    main()

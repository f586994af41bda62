# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Save after each step without waiting for the storage.

torchrun --nproc-per-node 2 examples/asynchronous.py /scratch/checkpoints --steps 4

`async_save` returns at once.  What is there at the call is copied to host memory during the next
forward and backward pass, and a process beside each rank writes it.  An error of such a save is raised by the next one,
or by `finish_saves`.
"""

from __future__ import annotations

from functools import partial

from training import Job, begin, latest, name_latest, place

import mbridge_fsdp_ckpt as ckpt

SETTINGS = ckpt.Settings(when_busy="wait")  # "skip" leaves a save out while the one before goes on


def main() -> None:
    """Train to the last step, from the latest checkpoint if there is one."""
    options = begin(__doc__)
    job, done = Job(options.tensor), 0
    if (directory := latest(options.folder)) is not None:
        done = ckpt.load(directory, model=job.model, optimizer=job.optimizer).values["step"]
    for step in range(done + 1, options.steps + 1):
        job.step(step - 1)
        ckpt.async_save(
            place(options.folder, step),
            model=job.model,
            optimizer=job.optimizer,
            values={"step": step},
            after_commit=partial(name_latest, options.folder, step),
            settings=SETTINGS,
        )
    ckpt.finish_saves()  # before the process ends


if __name__ == "__main__":
    main()

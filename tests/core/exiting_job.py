# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A job that ends while its second save still goes on beside it, by an error or not: exiting_job ROOT ERROR."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import mbridge_fsdp_ckpt
from testing import cpu_cuda
from testing.models import Recipe


def main(root: Path, error: str) -> None:
    """Two saves, and the end."""
    cpu_cuda.install()
    from tests.core import cases

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    trainable = cases.prepared(Recipe(layers=1), steps=1)

    def save(number: int) -> mbridge_fsdp_ckpt.SaveHandle:
        def add_files(directory: Path) -> None:
            (directory / "more").write_text("of the trainer")

        def after_commit() -> None:
            (root / "latest").write_text(str(number))

        return mbridge_fsdp_ckpt.async_save(
            root / f"iter_{number:07}",
            model=trainable.model,
            optimizer=trainable.optimizer,
            add_files=add_files,
            after_commit=after_commit,
        )

    save(1)
    saving = save(2)
    print(f"leaves while a save goes on: {not saving.done}", flush=True)
    if error:
        raise RuntimeError(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What one rank of the check runs; the environment is as torchrun would set it."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from testing.gpu.job import Job, Options
from testing.modules import MEGATRON_MODULES, installed

COLLECTIVE_LIMIT = timedelta(seconds=120)


def main() -> None:
    """Run all sections; what is found is written after each of them."""
    job = _job(Options(**json.loads(sys.argv[1])))
    job.seconds["start"] = round(job.options.limit - job.left, 2)
    for name, section in _sections().items():
        before = job.left
        job.sections[name] = job.attempt(name, partial(section, job))
        job.seconds[name] = round(before - job.left, 2)
        job.write()
    dist.barrier()
    dist.destroy_process_group()


def _job(options: Options) -> Job:
    """Join the others, on a GPU or on what stands in for one; this process ends itself when its time is up."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    job = Job(options, time.monotonic() + options.limit)
    for module in installed(MEGATRON_MODULES):  # before CUDA is replaced
        importlib.import_module(module)
    if options.cpu:
        from testing import cpu_cuda
        from testing.kernels import replace_cuda_only_kernels

        dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)
        cpu_cuda.install()
        replace_cuda_only_kernels()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=COLLECTIVE_LIMIT)
    return job


def _sections() -> dict[str, Any]:
    from mbridge_fsdp_ckpt.upstream_fixes import corrections
    from testing.gpu import copies, large, rates, resume

    corrections.apply(__name__)
    return {"resume": resume.resume, "large": large.large, "overlap": rates.overlap, "copies": copies.copies}


if __name__ == "__main__":
    main()

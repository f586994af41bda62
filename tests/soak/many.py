# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Background saves by the thousand in one job: what a rank and its checkpoint process hold after some and after all."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt.coordination.incarnation import base_of, default_store
from testing.models import Recipe
from tests.core import cases

FIRST = 10
"""Saves after which it is looked at first: caches are filled by then."""

Held = dict[str, int]


def run(root: str, saves: int) -> list[Held]:
    """Save so many times in the background, a step between; what is held after the first ones and at the end."""
    trainable, seen = cases.prepared(Recipe(layers=1)), []
    for number in range(1, saves + 1):
        trainable.step(number)
        directory = Path(root) / str(number)
        saving = mbridge_fsdp_ckpt.async_save(
            directory,
            model=trainable.model,
            optimizer=trainable.optimizer,
            values={"iteration": number},
            add_files=_add_a_file,
            after_commit=lambda: None,
        )
        if number in (FIRST, saves):
            saving.result()
            dist.barrier()
            seen.append(_held())
            dist.barrier()
        if dist.get_rank() == 0 and number > 2:
            shutil.rmtree(Path(root) / str(number - 2))
    mbridge_fsdp_ckpt.finish_saves()
    return seen


def _add_a_file(folder: Path) -> None:
    (folder / "notes").write_text("...")


def _held() -> Held:
    """What this process and the one beside it hold, once what ends a save has come to rest."""
    (beside,) = _children()
    found: Held = {}
    for _ in range(50):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before, found = found, {**_of("training process", os.getpid()), **_of("checkpoint process", beside)}
        found["keys in the store"] = base_of(default_store()).num_keys()
        if {name: n for name, n in found.items() if "bytes" not in name} == {
            name: n for name, n in before.items() if "bytes" not in name
        }:
            return found
        time.sleep(0.2)
    return found


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after[1]) == os.getpid() and after[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _of(name: str, pid: int) -> Held:
    proc = Path(f"/proc/{pid}")
    links: list[Any] = []
    for path in (proc / "fd").iterdir():
        try:
            links.append(path.readlink())
        except OSError:  # the one that lists them
            continue
    return {
        f"{name}: descriptors": len(links),
        f"{name}: connections": sum(str(link).startswith("socket:") for link in links),
        f"{name}: threads": len(list((proc / "task").iterdir())),
        f"{name}: bytes": int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
    }

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Another library's saves of the same tensors: Meta's `torch_checkpointing`, where it is installed.

python -m pip install --no-deps torch_checkpointing==0.1.1 installs it beside this project's pins.  It renames a
directory into place and flushes nothing: `flush` does.  Its own way past the page cache ends in EINVAL on ext4, and is
left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

IS_INSTALLED = find_spec("torch_checkpointing") is not None


class TorchCheckpointing:
    """Its manager on this rank.

    Args:
        background: Whether a process of its own writes.
        reshards: Whether it says where its DTensors lie, so that they can be loaded in another layout.
    """

    def __init__(self, *, background: bool, reshards: bool = False) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.schema import ItemSpec
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        memory = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        save = AsyncCheckpointSaverConfig(staging_config=memory) if background else SyncCheckpointSaverConfig()
        items = {"state": ItemSpec(resharder=DefaultResharder())} if reshards else {}
        config = CheckpointManager.Config(items=items, save=save, storage_config=storage)
        with patch.object(torch.accelerator, "is_available", _no), patch.object(torch.cuda, "is_available", _no):
            self._manager: Any = CheckpointManager(config)
        self.waited = 0.0
        """Seconds that steps of optimizers have waited for a snapshot."""

    def save(self, place: Path, state: Mapping[str, torch.Tensor]) -> Future[Any] | None:
        """What is done once it is there; None where it is there."""
        self.waited = 0.0
        future: Future[Any] | None = self._manager.save(str(place), {"state": state})
        return future

    def load(self, place: Path, state: Mapping[str, torch.Tensor]) -> None:
        """Into these tensors."""
        self._manager.load(str(place), into={"state": state})

    def wait_as_steps_do(self) -> None:
        """What belongs before each step of an optimizer."""
        begin = time.perf_counter()
        with self._manager.lock():
            self.waited += time.perf_counter() - begin

    def close(self) -> None:
        """Let its process end."""
        self._manager.close()


def _no() -> bool:
    """CUDA is there in name only: `testing.cpu_cuda` stands in for it."""
    return False


def flush(place: Path) -> None:
    """Have on the disk what lies below a directory."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())

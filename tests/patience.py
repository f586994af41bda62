"""A pool of ranks that is patient with gloo.

On a busy machine gloo now and then locks up Megatron-FSDP's overlapped collectives in a training step, or aborts the
process there, with stock as with this package.  A run that hangs with no frame of this package on any rank's stack, or
in which a process is killed by a signal, is tried once more from the checkpoints it began with; a hang in this package
fails at once, as does every exception.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.testing.outcomes import RankFailed, RanksHung
from mbridge_fsdp_ckpt.testing.ranks import RankPool

HANG_S = 100.0


class PatientPool(RankPool):
    """A pool that repeats a training run which hung outside this package."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """See `RankPool.run`."""
        directories = [Path(arg.directory) for arg in args if hasattr(arg, "directory")]
        before = [_kept(directory) for directory in directories]
        try:
            return super().run(function, *args, **{"time_limit": HANG_S, **kwargs})
        except (RanksHung, RankFailed) as failure:
            if not _is_gloos(failure):
                raise
            warnings.warn(f"a training run hung or died in gloo and is repeated: {args}", stacklevel=2)
        for directory, kept in zip(directories, before, strict=True):
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(kept, directory)
        return super().run(function, *args, **{"time_limit": HANG_S, **kwargs})


def _kept(directory: Path) -> Path:
    copy = directory.parent / f"{directory.name}.before"
    shutil.rmtree(copy, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(directory, copy))


def _is_gloos(failure: Exception) -> bool:
    if isinstance(failure, RankFailed):
        return "the process ended with return code -" in str(failure)
    frames = [line for line in str(failure).splitlines() if "/mbridge_fsdp_ckpt/" in line]
    return all("/mbridge_fsdp_ckpt/testing/" in line for line in frames)

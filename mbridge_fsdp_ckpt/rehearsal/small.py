"""The rehearsed job in small, for real: `testing.rehearsed`, in a process of its own that replaces CUDA by the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from mbridge_fsdp_ckpt.errors import RankFailedError
from mbridge_fsdp_ckpt.rehearsal.choices import Choices

PROGRAM = "mbridge_fsdp_ckpt.testing.rehearsed"
LIMIT_S = 1800.0
_SAID = 400  # characters


def run_small(model: str, choices: Choices, ranks: int) -> dict[str, Any]:
    """Save, load and reshard the job in small on CPU ranks; returns what the program found.

    Args:
        model: The configuration or recipe.
        choices: What was chosen of it.
        ranks: How many.

    Raises:
        RankFailedError: It failed, or did not end.
    """
    asked = {"model": model, "ranks": ranks, "layout": choices.layout, "kept": choices.kept}
    command = [sys.executable, "-m", PROGRAM]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(f"no end after {LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        named = [line for line in error.stderr.splitlines() if line.startswith("mbridge_fsdp_ckpt.errors.")]
        last = named[:1] or error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        raise _failed(last[0][:_SAID]) from error
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _failed(found: str) -> RankFailedError:
    return RankFailedError(
        expected="the job in small to run on CPU ranks",
        found=found,
        remedy="Not every model is built without a GPU; the rehearsal itself does without --run.",
    )

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a test does in a writer: a process that the package starts, and that learns of it by its environment.

`writer/sitecustomize.py`, which Python runs first in every process, calls `begin` there.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_TODO = "MBRIDGE_TEST_IN_WRITER"
_REPOSITORY = Path(__file__).parents[2]


@contextmanager
def told(function: Callable[..., object], *args: Any) -> Iterator[None]:
    """Writers that are started meanwhile call a function before anything else.

    Args:
        function: Of a module.
        *args: What it is called with, JSON-able.
    """
    todo = json.dumps([function.__module__, function.__name__, args])
    path = os.pathsep.join([str(Path(__file__).parent / "writer"), str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, {_TODO: todo, "PYTHONPATH": path}):
        yield


def begin() -> None:
    """In a writer: do what it was told."""
    module, name, args = json.loads(os.environ[_TODO])
    getattr(importlib.import_module(module), name)(*args)

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a rank pool and its workers say to each other, and how a function travels by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_NO_PROCESS_GROUP = "__ranks_without_process_group__"


def no_process_group[Function: Callable[..., Any]](function: Function) -> Function:
    """Mark a case that initialises torch.distributed itself, from the environment, as `pretrain()` does."""
    setattr(function, _NO_PROCESS_GROUP, True)
    return function


def wants_process_group(function: Callable[..., Any]) -> bool:
    """Whether the worker initialises the default process group before it calls `function`."""
    return not getattr(function, _NO_PROCESS_GROUP, False)


@dataclass(frozen=True)
class FunctionName:
    """A module-level function, as another process can find it."""

    module: str
    file: str | None
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionName:
        """The name of `function`; ValueError where its module does not hold it under that name."""
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        qualname = getattr(function, "__qualname__", "")
        if module is None or _lookup(module, qualname) is not function:
            raise ValueError(
                f"a case must be a module-level function, so that a worker can import it; got {function!r}"
            )
        name = module.__name__
        if name == "__main__":
            spec = getattr(module, "__spec__", None)
            name = spec.name if spec is not None else f"main_of_{os.getpid()}"
        return cls(name, getattr(module, "__file__", None), qualname)

    def find(self) -> Callable[..., Any]:
        """The function, in this process."""
        function = _lookup(self._import(), self.qualname)
        if function is None:
            raise ImportError(f"{self.module} ({self.file}) has no {self.qualname}")
        found: Callable[..., Any] = function
        return found

    def _import(self) -> ModuleType:
        """Import by name; by file where the name leads elsewhere (two test files of one name) or nowhere."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if self.file is None or error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            return self._load_file(self.file)
        if self.file is None or _same_file(getattr(module, "__file__", None), self.file):
            return module
        return self._load_file(self.file)

    def _load_file(self, file: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.module, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


def _lookup(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _same_file(left: str | None, right: str) -> bool:
    return left is not None and os.path.realpath(left) == os.path.realpath(right)


@dataclass(frozen=True)
class Fork:
    """Asks the template for a worker; the worker's end of its pipe follows.  The answer is its process id."""

    log: Path
    stacks: Path


@dataclass(frozen=True)
class Reap:
    """Asks the template how a worker ended.  The answer is minus the signal that killed it, or its exit status."""

    process_id: int


@dataclass(frozen=True)
class Case:
    """One call of one function on one rank."""

    function: FunctionName
    arguments: bytes  # pickled (args, kwargs): unpickled where a failure can be reported
    sys_path: tuple[str, ...]
    rank: int
    world_size: int
    store_port: int
    timeout_s: float
    process_group: bool
    nan_memory: bool

    def call_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the call."""
        args, kwargs = pickle.loads(self.arguments)  # from the parent process
        return args, kwargs


@dataclass(frozen=True)
class Ready:
    """The template has imported everything and waits to be forked."""


@dataclass(frozen=True)
class Returned:
    """The case's function returned this."""

    result: bytes


@dataclass(frozen=True)
class Raised:
    """The case's function raised, or its arguments or its result could not be pickled."""

    traceback: str


@dataclass(frozen=True)
class CleanUp:
    """Asks a worker to clean up: no rank needs this one's connections any more."""


@dataclass(frozen=True)
class Cleaned:
    """What the case left behind is gone, except for what `error` tells; the worker waits for the next one."""

    error: str | None = None

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Call a function with a module right after a script has imported it, without importing it first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls an action for each named module: at once if it is loaded, else when its code has run.

    Args:
        actions: The actions, by the module's name.  Each is called with the module.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = dict(actions)

    def install(self) -> None:
        """Call the actions of modules that are loaded, and watch for imports of the others."""
        for name, action in self._actions.items():
            if name in sys.modules:
                action(sys.modules[name])
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Stop watching for imports.  Calling it again does nothing."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that other finders find, with a loader that calls the action after the import."""
        if fullname not in self._actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self._actions[fullname])
        return spec


class _ActingLoader(Loader):
    """A loader that runs an action after the module's code, and leaves no trace of itself in the module."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, get_code, resources: whoever asks the spec before it is run

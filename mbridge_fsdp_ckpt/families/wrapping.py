# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Modules that torch puts around others: they do not count in names, as torch's own state dict leaves them out.

    torch.compile(layer)                 layer._orig_mod.weight                        layer.weight
    checkpoint_wrapper(layer)            layer._checkpoint_wrapped_module.weight       layer.weight
    one around the other                 layer._checkpoint_wrapped_module._orig_mod.weight

`torch.distributed.checkpoint.state_dict.get_state_dict` gives the names on the right for all of these; a plain
`state_dict()` keeps `_orig_mod`, `named_parameters` and `named_modules` keep both.  So a checkpoint moves between a
model that is wrapped and one that is not, and families see the layers that they know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The attributes under which wrappers hold what they wrap."""


def unwrapped(name: str) -> str:
    """A parameter's, buffer's or module's dotted name without the wrappers around the modules that it names."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped_modules(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Modules by name without wrappers; of a wrapper and what it wraps, the latter.

    Args:
        modules: As `named_modules` gives them: what is wrapped comes after its wrapper.
    """
    return {unwrapped(name): module for name, module in modules}


def innermost(module: Any) -> Any:
    """What wrappers around a module hold; the module itself where there are none."""
    while inside := [name for name in getattr(module, "_modules", ()) if name in WRAPPERS]:
        module = module._modules[inside[0]]
    return module

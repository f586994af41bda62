# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What becomes of each field of VeRL's `McoreCheckpointConfig`, and of what a user of this package adds to it."""

from __future__ import annotations

from typing import Any

from mbridge_fsdp_ckpt.integrations.common.options import Given, Handling, Option, given_by

CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What VeRL saves and loads."""

_NAMES = (
    f"Any of {', '.join(f'`{name}`' for name in CONTENTS)}; another name is refused, where VeRL leaves it out unsaid."
)
_REMEDY = "Correct the name."


def _has_strangers(config: Any, name: str) -> bool:
    return bool(set(config.get(name) or ()) - set(CONTENTS))


OPTIONS = (
    Option("save_contents", Handling.OBEYED, _NAMES, lambda config: _has_strangers(config, "save_contents"), _REMEDY),
    Option("load_contents", Handling.OBEYED, _NAMES, lambda config: _has_strangers(config, "load_contents"), _REMEDY),
    Option(
        "async_save",
        Handling.OBEYED,
        "An actor's saves go on asynchronously; all others stay synchronous, and say so.",
    ),
    Option("strict", Handling.OBEYED, "VeRL's own export reads it."),
    Option("save_lora_only", Handling.NO_EFFECT, "VeRL's manager for Megatron reads it nowhere, in no format."),
    Option(
        "mbridge_config",
        Handling.OBEYED,
        "`ckpt_format` names the format. `fsdp_dtensor_safe` holds arguments of `Settings`; "
        "one that it has not is refused. All others go to VeRL's own export.",
    ),
)
"""Of `checkpoint` of a role."""


def given(config: Any) -> dict[str, Given]:
    """What a checkpoint configuration says: VeRL's dataclass, or a mapping in its shape."""
    from verl.workers.config import McoreCheckpointConfig

    if isinstance(config, McoreCheckpointConfig):
        return given_by(config)
    defaults = given_by(McoreCheckpointConfig())
    return {name: Given(config.get(name, default), default) for name, (_, default) in defaults.items()}

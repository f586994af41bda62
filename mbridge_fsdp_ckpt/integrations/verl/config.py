# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint configuration of VeRL that cannot be had without the plug-in.

VeRL loads no plug-in where its settings name none, and swallows what one raises; a key in a free dictionary then says
nothing.  A class that the configuration names has to be imported: by the process that goes without, which stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import McoreCheckpointConfig

from mbridge_fsdp_ckpt.format.names import FORMAT_NAME
from mbridge_fsdp_ckpt.integrations.verl.choice import KEY, choice_of
from mbridge_fsdp_ckpt.integrations.verl.plugin import install


@dataclass
class SafeCheckpointConfig(McoreCheckpointConfig):  # type: ignore[misc]  # verl is untyped
    """VeRL's own, for checkpoints in `fsdp_dtensor_safe`; settings stand in `mbridge_config`, as with the other way.

    Raises:
        UnknownFormatError, ConfigurationError: See `choice.choice_of`.
    """

    def __post_init__(self) -> None:
        install()  # in this process, whoever loaded plug-ins or did not
        chosen = {KEY: FORMAT_NAME, **(self.mbridge_config or {})}
        object.__setattr__(self, "mbridge_config", chosen)  # VeRL's fields are frozen once they are set
        choice_of(self)

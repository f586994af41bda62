# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's `run_config.yaml`, read as text: what it says of a checkpoint without trusting it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mbridge_fsdp_ckpt.format.manifest import added_file
from mbridge_fsdp_ckpt.format.names import STOCK_FORMAT
from mbridge_fsdp_ckpt.integrations.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.io.files import is_plain_file, read_bounded
from mbridge_fsdp_ckpt.io.store import AnyPath

_FORMAT, _MANAGER = ("checkpoint", "ckpt_format"), ("checkpoint", "custom_manager_class")
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_MAX_CONFIG_BYTES = 1 << 24
_yaml: Any = import_module("yaml")  # of OmegaConf; it brings no types


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Bridge's `run_config.yaml`: looked at and edited as text; no object of it is ever made.

    Args:
        text: The content of the file.
        root: YAML's node of it; None where it is no mapping.
    """

    text: str
    root: Any = None

    @classmethod
    def of(cls, data: bytes) -> RunConfig:
        """The configuration in a file; an empty one where it is not legible."""
        text = data.decode(errors="surrogateescape")
        try:
            root = _yaml.compose(text, Loader=_yaml.SafeLoader)
        except (_yaml.YAMLError, RecursionError, ValueError):
            root = None
        return cls(text, root if isinstance(root, _yaml.MappingNode) else None)

    @classmethod
    def read(cls, directory: AnyPath) -> RunConfig:
        """A checkpoint's configuration; an empty one where it has none.

        Raises:
            ManifestError: It is larger than 16 MiB, or the metadata is damaged.
        """
        path = added_file(directory, RUN_CONFIG)
        return cls.of(read_bounded(path, _MAX_CONFIG_BYTES)) if is_plain_file(path) else cls("")

    @property
    def ckpt_format(self) -> str | None:
        """The format that the run saves in, as it is written; None where nothing says."""
        return self._get(*_FORMAT)

    @property
    def saves_optimizer(self) -> bool:
        """Whether the run saves optimizer state, as far as it says."""
        return self._get("checkpoint", "save_optim") != "false"

    def with_format(self, name: str) -> RunConfig:
        """The same for a run that saves in another format; where no format is named, the same."""
        config = self._with_setting(_FORMAT, name)
        if name == STOCK_FORMAT and (self._get(*_MANAGER) or "").startswith("mbridge_fsdp_ckpt."):
            return config._with_setting(_MANAGER, "null")
        return config

    def sizes(self) -> dict[str, int]:
        """Parallel sizes by axis, as far as it says them."""
        found = {axis: self._get("model", name) or "" for axis, name in _SIZES.items()}
        return {axis: int(size) for axis, size in found.items() if size.isdecimal()}

    @property
    def strategy(self) -> str | None:
        """Megatron-FSDP's sharding strategy; None where the run is not under it, or nothing says."""
        is_fsdp = self._get("ddp", "use_megatron_fsdp") == "true"
        return (self._get("ddp", "data_parallel_sharding_strategy") or None) if is_fsdp else None

    def _get(self, section: str, name: str) -> str | None:
        """A setting as it is written; None where there is none."""
        node = self._node(section, name)
        return None if node is None else str(node.value)

    def _with_setting(self, place: tuple[str, str], value: str) -> RunConfig:
        """The same with a setting that is there changed; where it is not there, the same."""
        section, name = place
        node = self._node(section, name)
        if node is None:
            return self
        start, end = node.start_mark.index, node.end_mark.index
        return RunConfig.of((self.text[:start] + value + self.text[end:]).encode(errors="surrogateescape"))

    def encoded(self) -> bytes:
        """The file's content."""
        return self.text.encode(errors="surrogateescape")

    def _node(self, section: str, name: str) -> Any:
        inner = _child(self.root, section)
        found = _child(inner, name)
        return found if isinstance(found, _yaml.ScalarNode) else None


def _child(node: Any, name: str) -> Any:
    if not isinstance(node, _yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)

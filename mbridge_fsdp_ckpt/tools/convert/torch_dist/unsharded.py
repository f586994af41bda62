# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The model of a `torch_dist` checkpoint, unsharded, and of tensors without memory.

It is built from Bridge's run configuration, or from Megatron-LM's arguments where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.families.naming import is_expert_name
from mbridge_fsdp_ckpt.format.values import encode_mapping
from mbridge_fsdp_ckpt.integrations.bridge.choice import tokens_of
from mbridge_fsdp_ckpt.integrations.bridge.names import RUN_CONFIG
from mbridge_fsdp_ckpt.integrations.bridge.without_gpu import as_if_there_was_one
from mbridge_fsdp_ckpt.io.store import AnyPath
from mbridge_fsdp_ckpt.live.planned import Planned
from mbridge_fsdp_ckpt.live.tensors import local_shard, storage_of
from mbridge_fsdp_ckpt.tools.convert import hugging_face
from mbridge_fsdp_ckpt.tools.convert.description import Parameters
from mbridge_fsdp_ckpt.tools.convert.torch_dist.arguments import built
from mbridge_fsdp_ckpt.tools.convert.torch_dist.common import Common

_IDENTIFYING = ("wd_mult", "lr_mult", "is_decoupled_lr")
_BY_SCHEDULE = ("max_lr", "min_lr")
_OF_THE_LAYOUT = ("params", "is_expert_parallel")  # Megatron-FSDP keeps experts in the group of all else


@dataclass(frozen=True, slots=True)
class UnshardedModel:
    """The model, the settings of its optimizer, and how many tokens there are without the vocabulary's padding."""

    module: Any
    optimizer: Any
    vocabulary_size: int | None

    @classmethod
    def of(cls, directory: AnyPath, arguments: Mapping[str, Any], *, trusted: bool) -> UnshardedModel:
        """Build it; a process group exists.

        Args:
            directory: The checkpoint.
            arguments: Megatron-LM's; they serve where there is no run configuration.
            trusted: Whether the run configuration is.

        Raises:
            ConfigurationError: Bridge cannot, or the run configuration is not trusted.
        """
        by_arguments = bool(arguments) and not (directory / RUN_CONFIG).is_file()
        if not by_arguments:
            _check_run_config(directory, trusted=trusted)
        try:
            return cls(*built(arguments, directory), None) if by_arguments else cls(*_configured(directory))
        except ConfigurationError:
            raise
        except Exception as error:  # whatever a configuration of this or another version makes of it
            source = "Megatron-LM's arguments" if by_arguments else RUN_CONFIG
            raise ConfigurationError(
                expected=f"a model that Megatron-Bridge builds from {source}",
                found=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
                remedy="Was the checkpoint written by another version, or is it a model of your own? "
                "Then import the module that defines it first.",
                key=str(directory),
            ) from error


def _check_run_config(directory: AnyPath, *, trusted: bool) -> None:
    if not (directory / RUN_CONFIG).is_file():
        raise ConfigurationError(
            expected=f"{RUN_CONFIG} in the checkpoint, or Megatron-LM's arguments, to build the model from",
            found="neither of the two",
            remedy="Load it with what wrote it, and save it with its arguments; or go through Hugging Face.",
            key=str(directory),
        )
    if not trusted:
        raise ConfigurationError(
            expected=f"a {RUN_CONFIG} that is trusted: Megatron-Bridge calls what it names, which can be any code",
            found="no word that it is",
            remedy="Add --trust-run-config if you trust who wrote the checkpoint.",
            key=str(directory / RUN_CONFIG),
        )


def _configured(directory: AnyPath) -> tuple[Any, Any, int | None]:
    """The model, optimizer settings and tokens by Bridge.  Its list of allowed targets keeps no code out."""
    from megatron.bridge.training.model_load_save import load_model_config
    from megatron.bridge.training.utils.checkpoint_utils import read_run_config
    from megatron.bridge.utils.instantiate_utils import instantiate

    provider, _ = load_model_config(str(directory))
    precision = torch.bfloat16 if provider.bf16 else torch.float16 if provider.fp16 else torch.float32
    for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        setattr(provider, name, 1 if name.startswith("pipeline") else None)
    hugging_face.configure(provider, precision, hugging_face.Sizes(expert_tensor=1))
    settings = read_run_config(str(directory / RUN_CONFIG)).get("optimizer")
    with as_if_there_was_one():
        chunks = provider.provide_distributed_model(wrap_with_ddp=False, init_model_with_meta_device=True)
    return chunks[0], instantiate(settings) if settings else None, tokens_of(provider)


def hyperparameters_of(model: UnshardedModel, planned: Iterable[Planned], common: Common) -> tuple[Parameters, str]:
    """The saved hyperparameters of each parameter, by the rules with which Megatron groups them.

    Returns:
        The parameters; and why there are none, empty where there are.
    """
    from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides

    parameters = Parameters()
    if model.optimizer is None:
        return parameters, f"optimizer state is left out: {RUN_CONFIG} has no optimizer section"
    overrides = get_standard_config_overrides(model.optimizer)
    own: dict[int, Mapping[str, Any]] = {}
    for group in _get_param_groups([model.module], model.optimizer, overrides):
        own |= {storage_of(parameter): group for parameter in group["params"]}
    for item in planned:
        name = item.plan.layout.optimizer_name
        group = own.get(storage_of(local_shard(item.tensor)))
        if not name or group is None:
            continue
        saved = _saved_group(common.groups, group, is_expert=is_expert_name(name))
        if saved is None:
            return parameters, f"optimizer state is left out: no param group of the checkpoint is that of {name}"
        known = {key: value for key, value in saved.items() if key not in _OF_THE_LAYOUT}
        parameters.add([name], encode_mapping(known, "param_groups"))
    return parameters, ""


def _saved_group(saved: Sequence[dict[str, Any]], own: Mapping[str, Any], *, is_expert: bool) -> dict[str, Any] | None:
    """The one saved group that has the parameter; None where none, or more than one, may have it."""
    fits = [group for group in saved if all(group.get(name) == own.get(name) for name in _IDENTIFYING)]
    fits = [group for group in fits if bool(group.get("is_expert_parallel")) == is_expert] or fits
    if len(fits) > 1:
        fits = [group for group in fits if all(group.get(name) == own.get(name) for name in _BY_SCHEDULE)]
    return fits[0] if len(fits) == 1 else None

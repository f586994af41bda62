# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""HybridDeviceOptimizer over Megatron-FSDP's shards.

megatron-core 0.19 hands DTensors to the inner optimizers and copies their gradients into plain tensors of the
global shape: the first `step()` raises.  Here every inner parameter is the plain local shard:

    offloaded to the host     a pinned host copy, in fp32 with param_update_in_fp32; copied back after its step
    on the device, fp32       a view of the shard: the inner optimizer updates the main weight itself; each step checks
                              that it still is one
    on the device, 16 bit     an fp32 copy; copied back after its step

An empty shard has no gradient and gets no state.  Plain (not distributed) parameters behave as upstream's.
This is the one file that overrides Megatron's HybridDeviceOptimizer; `upstream_fixes.corrections` puts it in place.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.live.tensors import local_shard


class ShardedHybridDeviceOptimizer(HybridDeviceOptimizer):  # type: ignore[misc]  # megatron-core is untyped
    """Steps on local shards; see the module."""

    def step(self, closure: Any = None) -> None:
        """One update of all parameters; gradients come from `decoupled_grad` where that is set, else from `grad`."""
        self._check_views()
        self._set_device_grads()
        super().step(closure)
        self._drop_device_grads()

    def _init_sub_optimizers(self) -> None:
        super()._init_sub_optimizers()
        for optimizer in self.cpu_optimizers:
            # torch's Adam asks the device, at each step, whether a graph is being captured.  A host optimizer is part
            # of no graph, and with overlap there is one a parameter: thousands of driver calls a step.
            optimizer._accelerator_graph_capture_health_check = _not_captured

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        threshold = offload_fraction * sum(
            parameter.numel() for group in self.param_groups for parameter in group["params"] if parameter.is_cuda
        )
        offloaded = 0
        host_groups, device_groups = [], []
        host_copies: dict[Any, torch.Tensor] = {}
        inner_of: dict[Any, torch.Tensor] = {}
        for group in self.param_groups:
            host, device = {**group, "params": []}, {**group, "params": []}
            for parameter in group["params"]:
                inner = local_shard(parameter)
                dtype = torch.float32 if self.param_update_in_fp32 else inner.dtype
                if parameter.is_cuda and offloaded < threshold:
                    offloaded += parameter.numel()
                    inner = host_copies[parameter] = self._host_copy(inner, dtype)
                elif inner.dtype != dtype:
                    inner = inner.to(dtype)
                inner_of[parameter] = inner
                (device if inner.is_cuda else host)["params"].append(inner)
            host_groups += [host] if host["params"] else []
            device_groups += [device] if device["params"] else []
        # Upstream reads the last map as "parameter -> inner parameter on the device, where they differ".
        to_parameter = {inner: parameter for parameter, inner in host_copies.items()}
        return host_groups, device_groups, host_copies, to_parameter, inner_of

    def _host_copy(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pin = self.pin_cpu_params and shard.numel() > 0
        return torch.empty(shard.shape, dtype=dtype, device="cpu", pin_memory=pin).copy_(shard)

    def _check_views(self) -> None:
        """Refuse to step views of memory that the parameters have left.

        Raises:
            ConfigurationError: Something gave parameters other memory after the views were taken.
        """
        views = [
            (inner, local_shard(parameter))
            for parameter, inner in self.param_to_inner_param.items()
            if parameter not in self.gpu_params_map_cpu_copy and inner.dtype == parameter.dtype
        ]
        stale = [shard for inner, shard in views if shard.numel() and inner.data_ptr() != shard.data_ptr()]
        if stale:
            first = tuple(stale[0].shape)
            raise ConfigurationError(
                expected="parameters to stay in the memory in which the optimizer found them",
                found=f"{len(stale)} of {len(views)} on the device elsewhere, the first of shape {first}",
                remedy="Leave the model where it is, or keep all of the optimizer on the host "
                "(optimizer_offload_fraction=1.0).",
            )

    def _set_device_grads(self) -> None:
        for parameter, inner in self.param_to_inner_param.items():
            if parameter not in self.gpu_params_map_cpu_copy:
                grad = _local_grad(parameter)
                inner.grad = None if grad is None else grad.to(inner.dtype)

    def _drop_device_grads(self) -> None:
        for parameter, inner in self.param_to_inner_param.items():
            if parameter not in self.gpu_params_map_cpu_copy:
                inner.grad = None

    def _set_sub_optimizer_grads(self) -> None:
        """Copy gradients to the host; upstream calls this on its device-to-host stream."""
        for optimizer in self.cpu_optimizers:
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    self._set_host_grad(inner)
            self._cpu_optimizer_map_data_event[optimizer] = self._d2h_stream.record_event()

    def _set_host_grad(self, inner: torch.Tensor) -> None:
        parameter = self.cpu_copys_map_gpu_param.get(inner)
        if parameter is None:
            return  # a parameter that has always lived on the host: its own gradient
        grad = _local_grad(parameter)
        if grad is None:
            inner.grad = None
            return
        if inner not in self.cpu_copy_map_grad:
            buffer = torch.empty(inner.shape, dtype=inner.dtype, device="cpu", pin_memory=self.pin_cpu_grads)
            self.cpu_copy_map_grad[inner] = buffer
        inner.grad = self.cpu_copy_map_grad[inner]
        inner.grad.copy_(grad, non_blocking=True)

    def _register_param_copy_back_gpu_hook(self) -> None:
        for optimizer in self.cpu_optimizers:
            optimizer.register_step_post_hook(self._copy_back_from_host)
        if self.gpu_optimizer is not None:
            self.gpu_optimizer.register_step_post_hook(self._copy_back_on_device)

    def _copy_back_from_host(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._h2d_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._h2d_stream):
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    if inner in self.cpu_copys_map_gpu_param:
                        local_shard(self.cpu_copys_map_gpu_param[inner]).copy_(inner, non_blocking=True)
        self._h2d_stream.record_event().wait(torch.cuda.current_stream())

    def _copy_back_on_device(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, inner in self.param_to_inner_param.items():
            if parameter not in self.gpu_params_map_cpu_copy and inner.dtype != parameter.dtype:
                local_shard(parameter).copy_(inner)

    def update_fp32_param_by_new_param(self) -> None:
        """Refresh the copies that the parameters have moved away from.

        A copy that rounds to its parameter is left alone: it may hold bits that the parameter has not.
        """
        for parameter, inner in self.param_to_inner_param.items():
            shard = local_shard(parameter)
            if not torch.equal(inner.to(device=shard.device, dtype=shard.dtype), shard):
                inner.copy_(shard)


def _not_captured() -> None:
    pass


def _local_grad(parameter: Any) -> torch.Tensor | None:
    grad = getattr(parameter, "decoupled_grad", parameter.grad)
    return None if grad is None or local_shard(grad).numel() == 0 else local_shard(grad)

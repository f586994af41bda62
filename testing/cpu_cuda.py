# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Run CUDA-only Megatron code on CPU ranks over gloo.

`install()` sends every CUDA device to the CPU, makes streams and events do nothing, ends a collective before it
returns (buffers that streams protect are freed while gloo, which knows none, would still write), and lets
`Tensor.is_cuda` stay true for everything that the program did not explicitly move to the host, so that
offloading optimizers take their real branches.  Sharding, collectives, hooks, optimizers and checkpointing
are then the real code; only kernels that exist for CUDA alone cannot run (see `kernels`).

What counts as explicit: `cpu()`, a device that is "cpu" or a `torch.device("cpu")` the program built itself,
`pin_memory=True`, and memory that numpy or a file provided.  `other.device` is not explicit, it means "where
`other` is".  Copies and `*_like` tensors are where their source is; results of arithmetic count as CUDA.

The replacements are attributes of torch and of `torch.Tensor`.  A torch-function mode was tried and rejected:
it is off in other threads, inside its own handlers and in backward hooks, all of which Megatron-FSDP uses.

Import what probes CUDA (Transformer Engine) before calling `install()`, and build process groups and models
after it.  Start the process with TORCHDYNAMO_DISABLE=1: compiled functions would look past the replacements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # ShardedTensor registers torch's own getters: before they are replaced
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from mbridge_fsdp_ckpt.patching import Patches
from testing import cuda_namespace, host_memory
from testing.host_memory import Place, place_of, put, requested, runnable

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")
_COPIES = ("clone", "contiguous", "__deepcopy__", "double", "float", "half", "bfloat16")
_INTEGER_COPIES = ("long", "int", "short", "char", "byte", "bool")
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of ProcessGroup, without point-to-point messages: a receive ends only after another rank went on to send."""
_FROM_HOST = ("from_numpy", "frombuffer", "from_file")

_clone = torch.Tensor.clone


class Installation:
    """The installed replacements: `uninstall()` them, or use it as a context manager that does."""

    def __init__(self, *, pretend_cuda_available: bool) -> None:
        self.pretend_cuda_available = pretend_cuda_available
        self._patches = Patches()
        cuda_namespace.replace(self._patches, pretend_available=pretend_cuda_available)
        _replace_tensor_attributes(self._patches)
        _replace_factories(self._patches)
        _replace_device_mesh(self._patches)
        _replace_collectives(self._patches)

    def uninstall(self) -> None:
        """Restore torch.  Calling it again does nothing."""
        global _active
        self._patches.undo()
        if _active is self:
            _active = None

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


_active: Installation | None = None


def install(pretend_cuda_available: bool = True) -> Installation:
    """Replace torch's CUDA by the CPU in this process; a second call returns what the first installed.

    Without `pretend_cuda_available`, `torch.cuda.is_available()` keeps telling the truth.  A second call that
    asks for the other answer raises RuntimeError: half the program would have seen the first one.
    """
    global _active
    if _active is None:
        _active = Installation(pretend_cuda_available=pretend_cuda_available)
    elif _active.pretend_cuda_available != pretend_cuda_available:
        raise RuntimeError(
            f"already installed with pretend_cuda_available={_active.pretend_cuda_available}; uninstall() that first"
        )
    return _active


def _deliver(result: Any, source: Any, place: Place) -> Any:
    """`result`, made from `source` (or from nothing), as a tensor at `place`: a copy if it is `source`'s memory."""
    if not isinstance(result, torch.Tensor) or result.is_meta or place_of(result) is place:
        return result
    if source is not None and host_memory.share_memory(result, source):
        result = _clone(result)
    return put(result, place)


def _replace_tensor_attributes(patches: Patches) -> None:
    def cuda(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        return _deliver(self, self, Place.CUDA)

    def pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self

    def record_stream(self: torch.Tensor, _stream: Any) -> None:
        """Memory is never reused early: streams do nothing."""

    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.set(torch.Tensor, "cpu", _host_copy(torch.Tensor.cpu))
    patches.set(torch.Tensor, "to", _move(torch.Tensor.to))
    patches.set(torch.Tensor, "type", _type(torch.Tensor.type))
    for name in (*_COPIES, *_INTEGER_COPIES):
        patches.set(torch.Tensor, name, _copy(getattr(torch.Tensor, name)))
    for name in _NEW:
        patches.set(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))
    patches.set(torch.Tensor, "device", property(_device_getter(torch.Tensor.device)))
    patches.set(torch.Tensor, "is_cuda", property(_is_cuda))


def _device_getter(native: Any) -> Callable[[torch.Tensor], torch.device]:
    def device(self: torch.Tensor) -> torch.device:
        truth: torch.device
        if torch.overrides.has_torch_function_unary(self):  # a ShardedTensor knows torch's own getter alone
            truth = torch.overrides.handle_torch_function(native.__get__, (self,), self)
        else:
            truth = native.__get__(self)
        if truth.type != "cpu":
            return truth
        on_host = place_of(self) is Place.HOST
        return host_memory.DEVICE_OF_HOST_TENSORS if on_host else host_memory.DEVICE_OF_CUDA_TENSORS

    return device


def _is_cuda(tensor: torch.Tensor) -> bool:
    # Fake and meta tensors have devices of their own, none of which is this object.
    return tensor.device is host_memory.DEVICE_OF_CUDA_TENSORS


def _host_copy(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _deliver(native(self, *args, **kwargs), self, Place.HOST)

    return cpu


def _copy(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _deliver(native(self, *args, **kwargs), self, place_of(self))

    return copy


def _move(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if isinstance(asked, torch.Tensor):
            place: Place | None = place_of(asked)
        else:
            place = None if isinstance(asked, torch.dtype) else requested(asked)
        if place is not None and args and not isinstance(asked, torch.Tensor):
            args = (runnable(asked), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = runnable(kwargs["device"])
        return _deliver(native(self, *args, **kwargs), self, place or place_of(self))

    return to


def _type(native: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`: optimizers compare the name that it answers with "torch.cuda.FloatTensor"."""

    @functools.wraps(native)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = place_of(self)
        if dtype is None:
            name = native(self)
            return name.replace("torch.", "torch.cuda.", 1) if place is Place.CUDA else name
        if isinstance(dtype, str):
            place = Place.CUDA if dtype.startswith("torch.cuda.") else Place.HOST
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return _deliver(native(self, dtype, *args, **kwargs), self, place)

    return type_


def _replace_factories(patches: Patches) -> None:
    for name in sorted({function.__name__ for function in _device_constructors()} | {*_LIKE, "clone"}):
        if hasattr(torch, name):
            patches.set(torch, name, _factory(getattr(torch, name)))
    for name in _FROM_HOST:
        patches.set(torch, name, _from_host(getattr(torch, name)))
    patches.set(torch, "load", _load(torch.load))


def _factory(native: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor from its first argument (if that is a tensor) or from nothing."""

    @functools.wraps(native)
    def create(*args: Any, **kwargs: Any) -> Any:
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        pinned = kwargs.pop("pin_memory", False)
        place = requested(kwargs.get("device"))
        if place is not None:
            kwargs["device"] = runnable(kwargs["device"])
        elif source is None and _inside_cuda_device_context():
            kwargs["device"] = torch.device("cpu")
        if place is None:
            place = Place.HOST if pinned else Place.CUDA if source is None else place_of(source)
        return _deliver(native(*args, **kwargs), source, place)

    return create


def _inside_cuda_device_context() -> bool:
    """Whether a `with torch.device("cuda")` would now supply the device (asking torch itself makes a tensor)."""
    modes = _get_current_function_mode_stack()
    contexts = [mode for mode in modes if isinstance(mode, DeviceContext)]
    return bool(contexts) and requested(contexts[-1].device) is Place.CUDA


def _from_host(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def wrap(*args: Any, **kwargs: Any) -> Any:
        return put(native(*args, **kwargs), Place.HOST)

    return wrap


def _load(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        asks_for_device = isinstance(map_location, (str, torch.device))
        return native(file, runnable(map_location) if asks_for_device else map_location, *args, **kwargs)

    return load


def _replace_collectives(patches: Patches) -> None:
    for name in _COLLECTIVES:
        native = getattr(dist.ProcessGroup, name, None)  # the names span versions of torch
        if native is not None:
            patches.set(dist.ProcessGroup, name, _finished(native))


def _finished(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def collective(*args: Any, **kwargs: Any) -> Any:
        work = native(*args, **kwargs)
        if isinstance(work, dist.Work):
            work.wait()
        return work

    return collective


def _replace_device_mesh(patches: Patches) -> None:
    native_init, native_from_group = DeviceMesh.__init__, DeviceMesh.from_group

    @functools.wraps(native_init)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        native_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    @functools.wraps(native_from_group)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return native_from_group(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    patches.set(DeviceMesh, "__init__", init)
    patches.set(DeviceMesh, "from_group", staticmethod(from_group))

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What `torch.cuda` answers on a machine without CUDA: one device of endless memory, and nothing asynchronous."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mbridge_fsdp_ckpt.patching import Patches

DEVICE_MEMORY = 2**40
"""Bytes of memory that the device claims."""

COMPUTE_CAPABILITY = (9, 0)
"""Compute capability that the device claims: Hopper, so that no feature is refused for its age."""


def _do_nothing(_self: Any, *_: Any, **__: Any) -> None:
    """What a stream or event does to wait: all work is finished as soon as it is queued."""


def _is_done(_self: Any) -> bool:
    return True


class Event:
    """An event that has always happened."""

    __init__ = record = wait = synchronize = _do_nothing
    query = _is_done

    def elapsed_time(self, _end: Any) -> float:
        """The milliseconds between two events: none."""
        return 0.0


class Stream:
    """A stream on which all work is finished as soon as it is queued."""

    device = torch.device("cpu")
    device_index = priority = cuda_stream = stream_id = 0
    __init__ = __exit__ = wait_stream = wait_event = synchronize = _do_nothing
    query = _is_done

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never."""
        return False

    def __enter__(self) -> Stream:
        return self

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event if event is not None else Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return (0, 0)


def _answer(value: Any) -> Callable[..., Any]:
    """A function of its own (torch.compile's tables refuse one object under two names) that returns `value`."""
    return lambda *_, **__: value


def _properties() -> types.SimpleNamespace:
    major, minor = COMPUTE_CAPABILITY
    return types.SimpleNamespace(
        name="CPU rank",
        total_memory=DEVICE_MEMORY,
        multi_processor_count=1,
        major=major,
        minor=minor,
        L2_cache_size=2**20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=2**17,
    )


def _device_answers() -> dict[str, Any]:
    stream = Stream()
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": _answer(stream),
        "default_stream": _answer(stream),
        "set_stream": _answer(None),
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_device": _answer(0),
        "device_count": _answer(1),
        "set_device": _answer(None),
        "synchronize": _answer(None),
        "is_current_stream_capturing": _answer(False),
        "get_device_capability": _answer(COMPUTE_CAPABILITY),
        "get_device_name": _answer("CPU rank"),
        "get_device_properties": _answer(_properties()),
        "is_bf16_supported": _answer(True),
        "_exchange_device": _answer(0),
        "_maybe_exchange_device": _answer(0),
    }


def _memory_answers() -> dict[str, Any]:
    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    nothing = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated")
    answers = {name: _answer(0) for name in counters} | {name: _answer(None) for name in nothing}
    answers["mem_get_info"] = _answer((DEVICE_MEMORY, DEVICE_MEMORY))
    answers["memory_stats"] = lambda *_, **__: {}
    return answers


def _random_answers() -> dict[str, Any]:
    """CUDA random state is the CPU's: what Megatron's RNG tracker swaps then governs the numbers that are drawn.

    Each answer is a function of its own: torch.compile's tables refuse a bound method that torch has too.
    """
    generator = torch.default_generator

    def set_all(states: list[torch.Tensor]) -> None:
        generator.set_state(states[0])

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    def initial_seed() -> int:
        return generator.initial_seed()

    return {
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "set_rng_state_all": set_all,
        "manual_seed": manual_seed,
        # torch.manual_seed() calls this after it seeded the CPU's generator, which is the same one
        "manual_seed_all": _answer(None),
        "initial_seed": initial_seed,
    }


@contextlib.contextmanager
def _no_range(*_: Any, **__: Any) -> Iterator[None]:
    yield


def replace(patches: Patches, *, pretend_available: bool) -> None:
    """Let `torch.cuda` give the answers above."""
    random_answers = _random_answers()
    for name, answer in (_device_answers() | _memory_answers() | random_answers).items():
        patches.set(torch.cuda, name, answer)
    for name, answer in random_answers.items():
        patches.set(torch.cuda.random, name, answer)
    patches.set(torch.cuda, "default_generators", (torch.default_generator,))
    # Initialised, even after a fork: modules that imported _lazy_call before now would else queue RNG changes for ever.
    patches.set(torch.cuda, "_initialized", True)
    patches.set(torch.cuda, "_is_in_bad_fork", _answer(False))
    patches.set(torch.cuda, "_lazy_init", _answer(None))
    patches.set(torch.cuda, "_lazy_call", lambda function, **_: function())
    for name in ("__enter__", "__exit__"):
        patches.set(torch.cuda.device, name, _answer(None))
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, _answer(0))
    patches.set(torch.cuda.nvtx, "range", _no_range)
    _replace_accelerator(patches)
    if pretend_available:
        patches.set(torch.cuda, "is_available", _answer(True))
        patches.set(torch.accelerator, "is_available", _answer(True))


def _replace_accelerator(patches: Patches) -> None:
    """`torch.accelerator` gives the same answers; torch's optimizers ask there whether a graph is captured."""
    answers = {"current_device_index": 0, "device_count": 1, "current_stream": Stream()}
    for name, value in answers.items():
        patches.set(torch.accelerator, name, _answer(value))
    for name in ("set_device_index", "set_stream", "synchronize"):
        patches.set(torch.accelerator, name, _answer(None))

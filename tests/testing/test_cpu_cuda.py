# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The CPU stands in for CUDA: which tensors count as CUDA tensors, and everything restored afterwards."""

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Shard

from testing import cpu_cuda
from testing.ranks import RankPool


@pytest.fixture
def shim() -> Iterator[cpu_cuda.Installation]:
    with cpu_cuda.install() as installation:
        yield installation


@pytest.mark.usefixtures("shim")
class TestPlaces:
    def test_what_was_not_moved_to_the_host_is_a_cuda_tensor(self) -> None:
        assert torch.zeros(3).is_cuda
        assert torch.nn.Parameter(torch.zeros(3)).is_cuda
        assert torch.zeros(3, device="cuda").is_cuda
        assert torch.zeros(3, device=0).is_cuda
        assert torch.zeros(3, device=torch.device("cuda", 0)).is_cuda
        assert not torch.zeros(3, device="meta").is_cuda

    def test_every_kernel_still_runs_on_the_cpu(self) -> None:
        assert torch.zeros(3, device="cuda").device.type == "cpu"
        assert torch.zeros(3).cuda().device == torch.device("cpu")

    def test_an_offloading_optimizer_tells_its_copies_from_the_parameters(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        offloaded = parameter.detach().clone().cpu().pin_memory()
        assert parameter.is_cuda
        assert not offloaded.is_cuda
        assert not offloaded.detach().clone().float().is_cuda
        assert not offloaded.data.is_cuda
        assert not torch.zeros_like(offloaded).is_cuda
        assert torch.zeros_like(parameter).is_cuda
        assert not torch.empty(3, pin_memory=True, device="cpu").is_cuda

    def test_cpu_copies_and_leaves_the_source_where_it_is(self) -> None:
        source = torch.ones(3)
        host = source.cpu()
        host.zero_()
        assert source.is_cuda
        assert source.tolist() == [1.0, 1.0, 1.0]
        assert host.cpu() is host

    def test_cuda_copies_from_the_host_only(self) -> None:
        source = torch.ones(3)
        assert source.cuda() is source
        host = source.cpu()
        back = host.cuda()
        assert back.is_cuda
        assert back.data_ptr() != host.data_ptr()
        assert not host.is_cuda

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
    def test_to_an_explicit_host_device(self, device: Any) -> None:
        for moved in (torch.ones(3).to(device), torch.ones(3).to(device=device, dtype=torch.bfloat16)):
            assert not moved.is_cuda
        assert torch.ones(3).cpu().to("cuda:0").is_cuda

    def test_the_device_of_another_tensor_means_where_that_one_is(self) -> None:
        on_cuda, on_host = torch.ones(3), torch.ones(3).cpu()
        assert on_cuda.device == on_host.device
        assert torch.zeros(3, device=on_cuda.device).is_cuda
        assert not torch.zeros(3, device=on_host.device).is_cuda
        assert on_host.to(on_cuda.device).is_cuda
        assert not on_cuda.to(on_host).is_cuda
        assert on_cuda.to(torch.bfloat16).is_cuda
        assert not on_host.to(torch.bfloat16).is_cuda
        assert not on_host.new_zeros(3).is_cuda

    def test_views_are_where_their_base_is(self) -> None:
        host = torch.zeros(4, device="cpu")
        assert not host[1:].view(3, 1).is_cuda
        assert torch.zeros(4)[1:].view(3, 1).is_cuda

    def test_copies_are_where_their_source_is(self) -> None:
        host = torch.zeros(4).cpu()
        for same in (host.clone(), host.contiguous(), host.double(), host.long(), copy.deepcopy(host)):
            assert not same.is_cuda

    def test_memory_of_numpy_is_on_the_host(self) -> None:
        assert not torch.from_numpy(np.zeros(3)).is_cuda
        assert not torch.frombuffer(bytearray(8), dtype=torch.float32).is_cuda

    def test_modules_move(self) -> None:
        module = torch.nn.Linear(2, 2).cpu()
        assert not module.weight.is_cuda
        assert module.to("cuda").weight.is_cuda
        with torch.device("cuda"):
            assert torch.nn.Linear(2, 2).weight.is_cuda
            assert torch.ones(2).is_cuda

    def test_type_names_the_place(self) -> None:
        assert torch.zeros(3).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(3, dtype=torch.bfloat16).cpu().type() == "torch.BFloat16Tensor"
        assert torch.zeros(3).cpu().type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"

    def test_gradients_flow_through_moves(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        torch.autograd.backward((weight.cpu().cuda() * 2).sum())
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0, 2.0]

    def test_other_threads_and_backward_hooks_see_the_same(self) -> None:
        seen: list[bool] = []

        def look(*_: Any) -> None:
            seen.append(torch.zeros(3, device="cuda").is_cuda and not torch.zeros(3).cpu().is_cuda)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(look)
        torch.autograd.backward(weight.sum())
        assert seen == [True, True]


@pytest.mark.usefixtures("shim")
class TestCudaNamespace:
    def test_streams_and_events_do_nothing(self) -> None:
        cuda: Any = torch.cuda
        stream, event = cuda.Stream(), cuda.Event(enable_timing=True)
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            event.record(stream)
        stream.record_event().wait(cuda.current_stream())
        torch.zeros(3).record_stream(stream)
        assert event.query()
        assert stream.query()
        assert event.elapsed_time(event) == 0.0
        assert not cuda.is_current_stream_capturing()
        assert not torch.accelerator.current_stream().is_capturing()

    def test_there_is_one_device(self) -> None:
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == (9, 0)
        with torch.cuda.device(0):
            torch.cuda.synchronize()

    def test_the_random_state_governs_what_is_drawn(self) -> None:
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4), first)
        torch.cuda.default_generators[0].set_state(state)
        assert torch.equal(torch.rand(4), first)

    def test_functions_imported_earlier_run_at_once(self) -> None:
        called: list[int] = []
        EARLY_LAZY_CALL(lambda: called.append(1))
        assert called == [1]


EARLY_LAZY_CALL: Any = torch.cuda._lazy_call


def test_install_twice_is_install_once(shim: cpu_cuda.Installation) -> None:
    device = vars(torch.Tensor)["device"]
    assert cpu_cuda.install() is shim
    assert vars(torch.Tensor)["device"] is device


def test_install_refuses_another_answer_about_cuda(shim: cpu_cuda.Installation) -> None:
    assert shim.pretend_cuda_available
    with pytest.raises(RuntimeError, match=r"already installed with pretend_cuda_available=True; uninstall\(\)"):
        cpu_cuda.install(pretend_cuda_available=False)


def test_the_answer_about_cuda_can_stay_true() -> None:
    available = torch.cuda.is_available()
    with cpu_cuda.install(pretend_cuda_available=False):
        assert torch.cuda.is_available() == available
        assert torch.zeros(3, device="cuda").is_cuda


def test_uninstall_restores_torch() -> None:
    owners: list[Any] = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.device, torch.cuda.nvtx]
    owners += [torch.accelerator, DeviceMesh, dist.ProcessGroup]
    before = [dict(vars(owner)) for owner in owners]
    tensor = torch.zeros(3)
    seen = [tensor.is_cuda]
    installation = cpu_cuda.install()
    seen.append(tensor.is_cuda)
    installation.uninstall()
    installation.uninstall()
    assert [dict(vars(owner)) for owner in owners] == before
    seen.append(tensor.is_cuda)
    with cpu_cuda.install():
        seen.append(tensor.is_cuda)
    assert seen == [False, True, False, True]


def inspect_dtensors() -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (2,))
    assert dist.group.WORLD is not None
    from_group = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    tensor: Any = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    host = tensor.detach().clone().cpu().pin_memory()
    return {
        "mesh": (mesh.device_type, from_group.device_type),
        "tensor": (tensor.is_cuda, tensor.to_local().is_cuda),
        "host": (type(host).__name__, host.is_cuda, host.to_local().is_cuda, host.float().is_cuda),
        "to": (tensor.to("cpu").is_cuda, tensor.to(torch.bfloat16).is_cuda, host.to("cuda").is_cuda),
        "like": (torch.zeros_like(tensor).is_cuda, torch.zeros_like(host).is_cuda),
        "shared": host.to_local().data_ptr() == tensor.to_local().data_ptr(),
        "sum": tensor.full_tensor().sum().item(),
    }


def test_dtensors_are_where_their_local_tensors_are(rank_pool: RankPool) -> None:
    expected = {
        "mesh": ("cpu", "cpu"),
        "tensor": (True, True),
        "host": ("DTensor", False, False, False),
        "to": (False, True, True),
        "like": (True, False),
        "shared": False,
        "sum": 12.0,
    }
    assert rank_pool.run(inspect_dtensors, ranks=2) == [expected, expected]


def inspect_sharded_tensor() -> tuple[str, bool]:
    rank = dist.get_rank()
    metadata = ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    tensor = init_from_local_shards([sharded_tensor.Shard(torch.ones(2, 3), metadata)], 4, 3)
    return tensor.device.type, tensor.is_cuda


def test_a_sharded_tensor_is_where_its_shards_are(rank_pool: RankPool) -> None:
    """It answers torch's own getters alone; Megatron-Core's `torch_dist` asks it in a load."""
    assert rank_pool.run(inspect_sharded_tensor, ranks=2) == [("cpu", True)] * 2


def see_collectives() -> dict[str, bool]:
    if dist.get_rank() == 1:
        time.sleep(0.5)
    own, every = torch.full((1 << 16,), 1.0 + dist.get_rank()), torch.zeros(1 << 17)
    gathered = dist.all_gather_into_tensor(every, own, async_op=True)
    own.untyped_storage().resize_(0)  # as Megatron-FSDP frees what it has sent
    reduced = torch.ones(3)
    with _coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(reduced)
    return {
        "finished": gathered.is_completed() and all(work.is_completed() for work in coalesced.works),
        "gathered": every.view(2, -1).mean(1).tolist() == [1.0, 2.0],
        "reduced": reduced.tolist() == [2.0, 2.0, 2.0],
    }


def test_a_collective_has_ended_when_it_returns(rank_pool: RankPool) -> None:
    expected = {"finished": True, "gathered": True, "reduced": True}
    assert rank_pool.run(see_collectives, ranks=2) == [expected, expected]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The rank pool: worlds of every size, and an understandable end for cases that fail, hang or die."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from testing.ranks import Died, RankFailed, RankPool, RanksHung, no_process_group
from testing.templates import Templates


def sum_of_ranks(offset: int = 0) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise KeyError("the reason")
    dist.barrier()


def ignore_the_failing_rank(failing: int) -> None:
    if dist.get_rank() == failing:
        raise KeyError("the reason")
    time.sleep(600)


def wait_for_rank_0_in_a_collective() -> None:
    if dist.get_rank() == 0:
        sleep_without_end()
    dist.barrier()


def sleep_without_end() -> None:
    while True:
        time.sleep(1)


def kill_rank(rank: int) -> str:
    """Not before the others have joined: they fail if a peer goes meanwhile."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined/{dist.get_rank()}", "")
    if dist.get_rank() == rank:
        store.wait([f"joined/{other}" for other in range(dist.get_world_size())])
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def exit_with(code: int) -> None:
    os._exit(code)


def return_something_unpicklable() -> Any:
    return threading.Lock()


@no_process_group
def initialise_from_the_environment() -> tuple[bool, int, int, str]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]


def leave_things_behind() -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def what_is_left() -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    return {
        "environment": os.environ.get("LEFT_BEHIND"),
        "directory is /": Path.cwd() == Path("/"),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "parallel": parallel_state.model_parallel_is_initialized(),
        "rng": megatron_random._CUDA_RNG_STATE_TRACKER,
    }


def draw() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def mesh_sum(groups_before: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for _ in range(groups_before):
        dist.new_group([0, 3])
    mesh = init_device_mesh("cuda", (2, 2))
    local = torch.full((2,), float(mesh.get_local_rank(0) + 1))
    tensor: Any = DTensor.from_local(local, mesh, [Shard(0), Replicate()]) * 2
    return float(tensor.full_tensor().sum())


@pytest.fixture(scope="module")
def frail_pool() -> Iterator[RankPool]:
    """A pool of its own for cases that end workers: those of `rank_pool` have imported much by now."""
    with RankPool(2, time_limit=60.0) as pool:
        yield pool


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_case_runs_on_a_world_of_its_own(rank_pool: RankPool, size: int) -> None:
    expected = float(sum(range(size)) + 10 * size)
    assert rank_pool.run(sum_of_ranks, 10, ranks=size) == [(rank, size, expected) for rank in range(size)]


def test_keyword_arguments_arrive(rank_pool: RankPool) -> None:
    assert rank_pool.run(sum_of_ranks, offset=5, ranks=2) == [(0, 2, 11.0), (1, 2, 11.0)]


def test_the_processes_stay_from_case_to_case(rank_pool: RankPool) -> None:
    first = rank_pool.run(process_id, ranks=2)
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert rank_pool.run(process_id, ranks=2) == first


def test_a_failure_names_the_rank_and_shows_its_traceback_and_output(frail_pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        frail_pool.run(raise_on, 1, ranks=2)
    assert time.monotonic() - start < 20
    assert next(iter(failure.value.tracebacks)) == 1
    text = str(failure.value)
    assert "test_ranks.raise_on: failed on rank 1" in text
    assert "KeyError: 'the reason'" in text
    assert "about to fail" in text
    assert frail_pool.run(sum_of_ranks, ranks=2) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_result_that_cannot_be_pickled_is_a_failure(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="cannot pickle"):
        rank_pool.run(return_something_unpicklable, ranks=1)


def test_a_case_may_initialise_the_process_group_itself(rank_pool: RankPool) -> None:
    for _ in range(2):
        expected = [(False, 0, 2, "0"), (False, 1, 2, "1")]
        assert rank_pool.run(initialise_from_the_environment, ranks=2) == expected


def test_the_next_case_finds_nothing_of_the_last(megatron_ranks: RankPool) -> None:
    megatron_ranks.run(leave_things_behind, ranks=2)
    nothing = {
        "environment": None,
        "directory is /": False,
        "dtype": torch.float32,
        "grad": True,
        "parallel": False,
        "rng": None,
    }
    assert megatron_ranks.run(what_is_left, ranks=2) == [nothing, nothing]


def test_every_case_draws_the_same_random_numbers(rank_pool: RankPool) -> None:
    first = rank_pool.run(draw, ranks=2)
    assert first[0] == first[1]
    assert rank_pool.run(draw, ranks=2) == first


def test_equal_meshes_of_two_cases_use_their_own_groups(rank_pool: RankPool) -> None:
    for groups_before in (0, 2, 3):
        assert rank_pool.run(mesh_sum, groups_before, time_limit=60) == [12.0] * 4


def test_a_failure_does_not_wait_for_ranks_that_do_not_notice(frail_pool: RankPool) -> None:
    survivor = frail_pool.run(process_id, ranks=2)[0]
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        frail_pool.run(ignore_the_failing_rank, 0, ranks=2)
    assert 4 < time.monotonic() - start < 20
    assert list(failure.value.tracebacks) == [0]
    assert "rank 1 had not finished" in str(failure.value)
    assert "in ignore_the_failing_rank" in str(failure.value)
    processes = frail_pool.run(process_id, ranks=2)
    assert processes[0] == survivor, "the rank that failed cleaned up and serves on"


def test_a_hang_shows_the_stack_of_every_rank(frail_pool: RankPool) -> None:
    before = frail_pool.run(process_id, ranks=2)
    with pytest.raises(RanksHung) as hang:
        frail_pool.run(wait_for_rank_0_in_a_collective, ranks=2, time_limit=4)
    assert sorted(hang.value.stacks) == [0, 1]
    assert "in sleep_without_end" in hang.value.stacks[0]
    assert "in wait_for_rank_0_in_a_collective" in hang.value.stacks[0]
    assert "in barrier" in hang.value.stacks[1]
    assert "in wait_for_rank_0_in_a_collective" in hang.value.stacks[1]
    assert all(stack in str(hang.value) for stack in hang.value.stacks.values())
    assert frail_pool.run(sum_of_ranks, ranks=2) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert not set(before) & set(frail_pool.run(process_id, ranks=2))


def test_a_rank_may_die_where_the_case_says_so(frail_pool: RankPool) -> None:
    before = frail_pool.run(process_id, ranks=2)
    assert frail_pool.run(kill_rank, 1, ranks=2, may_die={1}) == ["survived", Died(-signal.SIGKILL)]
    after = frail_pool.run(process_id, ranks=2)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_death_that_nobody_expected_is_a_failure(frail_pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="ended with return code 3"):
        frail_pool.run(exit_with, 3, ranks=1)
    assert frail_pool.run(sum_of_ranks, ranks=1) == [(0, 1, 0.0)]


def test_only_module_level_functions_are_accepted(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level function"):
        rank_pool.run(lambda: None)


def test_worlds_larger_than_the_pool_are_refused() -> None:
    with RankPool(2) as pool:
        with pytest.raises(ValueError, match="1 to 2 ranks, not on 3"):
            pool.run(process_id, ranks=3)
        with pytest.raises(ValueError, match="may_die"):
            pool.run(process_id, ranks=1, may_die={1})
    with pytest.raises(ValueError, match="closed"):
        pool.run(process_id)


def test_a_worker_that_cannot_start_says_why() -> None:
    reason = r"ended with return code 1(?s:.*)No module named 'no_such_module'"
    with RankPool(1, preload=["no_such_module"]) as pool, pytest.raises(RuntimeError, match=reason):
        pool.run(process_id)


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from testing.ranks import RankPool\n"
        "def process_id():\n"
        "    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(1)\n"
        "    print(pool.run(process_id)[0], pool.processes[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(mbridge_fsdp_ckpt.__path__[0]).parent)
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root}
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    worker, expected = (int(word) for word in result.stdout.split())
    assert worker == expected
    _wait_for_the_end_of(worker)


def _wait_for_the_end_of(process: int) -> None:
    deadline = time.monotonic() + 10
    while _is_running(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(process)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def forked_from() -> int:
    return os.getppid()


def test_pools_share_what_they_are_forked_from_and_nothing_else() -> None:
    templates = Templates()
    with RankPool(1, templates=templates) as first, RankPool(1, templates=templates) as second:
        (template,) = first.run(forked_from)
        assert second.run(forked_from) == [template]
        assert first.run(process_id) != second.run(process_id)
        first.close()
        assert second.run(forked_from) == [template], "a pool that is closed takes nothing from the others"
        os.kill(template, signal.SIGKILL)
        _wait_for_the_end_of(template)
        (another,) = second.run(forked_from)
        assert another != template
    templates.close()
    assert not _is_running(another)


def test_another_environment_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = Templates()
    with RankPool(1, templates=templates) as first, RankPool(1, templates=templates) as second:
        (template,) = first.run(forked_from)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
        assert second.run(forked_from) != [template]
        assert first.run(forked_from) == [template], "what a pool has, it keeps"
    templates.close()


def test_one_that_follows_writes_over_no_others_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    templates = Templates()
    with (
        RankPool(1, preload=["json"], templates=templates) as first,
        RankPool(1, preload=["csv"], templates=templates) as second,
    ):
        (template,) = first.run(forked_from)
        second.run(forked_from)
        os.kill(template, signal.SIGKILL)
        _wait_for_the_end_of(template)
        first.run(forked_from)
        assert len(list(tmp_path.glob("templates-*/*.log"))) == 3
    templates.close()

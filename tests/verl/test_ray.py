# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The same through Ray: actors save, are killed, and others repeat the uninterrupted run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.integrations.verl.choice import VARIABLE
from testing.modules import is_installed
from testing.outcomes import RankFailed, RanksHung
from testing.process import rank_environment
from testing.ranks import RankPool
from tests.patience import KILLED, patiently
from tests.verl import cases
from tests.verl.actors import Trainer
from tests.verl.tiny import SAFE, Setup

pytestmark = pytest.mark.bridge

ACTORS = 2
START_S, CASE_S = 300.0, 240.0
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def ray_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray of our own on this machine, which ends with the test."""
    if not is_installed("ray"):
        pytest.skip("needs ray, which is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home directory
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    own = {name: value for name, value in rank_environment().items() if os.environ.get(name) != value}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), own.get("PYTHONPATH")]))
    ray.init(
        address="local",
        num_cpus=ACTORS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": own},
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def start(ray: Any, **environment: str) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    actor = ray.remote(Trainer).options(num_cpus=1, runtime_env={"env_vars": environment})
    return [actor.remote(rank, ACTORS, port) for rank in range(ACTORS)]


def train(ray: Any, actors: list[Any], folder: Path, *arguments: Any) -> list[dict[str, Any]]:
    """What the actors return, or what `RankPool.run` would raise."""
    folder.mkdir(exist_ok=True)
    stacks = [folder / str(rank) for rank in range(ACTORS)]
    jobs = [actor.train.remote(*arguments, path) for actor, path in zip(actors, stacks, strict=True)]
    ray.wait(jobs, num_returns=ACTORS, timeout=CASE_S)
    written = {rank: path.read_text() for rank, path in enumerate(stacks)}
    if any(written.values()):
        raise RanksHung(f"actors hung: {written}", written)
    failed = {}
    for rank, job in enumerate(jobs):
        try:
            ray.get(job, timeout=0)
        except ray.exceptions.RayActorError as error:
            failed[rank] = f"{KILLED}: {error}"
        except ray.exceptions.RayTaskError as error:
            failed[rank] = str(error)
    if failed:
        raise RankFailed(f"actors failed: {failed}", failed)
    results: list[dict[str, Any]] = ray.get(jobs)
    return results


@pytest.mark.timeout(3 * (START_S + CASE_S))
def test_killed_actors_are_followed_by_others_that_repeat_the_run(
    source: str, ray_runtime: Any, verl_ranks: RankPool, tmp_path: Path
) -> None:
    """The first job chooses the format by an override, the second by the environment variable."""
    ray, setup = ray_runtime, Setup(source, str(tmp_path / "run"))
    whole = verl_ranks.run(cases.train, setup.on(directory=str(tmp_path / "whole")), 4)

    def job(own: Setup, steps: int, **environment: str) -> tuple[set[int], list[dict[str, Any]]]:
        """Actors that train, save at the end, and are killed: their processes, and what they saw."""
        actors = start(ray, **environment)
        try:
            processes = ray.get([actor.process.remote() for actor in actors], timeout=START_S)
            assert all(loaded for _, loaded in processes), "importing verl did not load the plug-in"
            return {process for process, _ in processes}, train(ray, actors, tmp_path / "stacks", own, steps, (steps,))
        finally:
            for actor in actors:
                with pytest.raises(ray.exceptions.RayActorError):
                    ray.get(actor.be_killed.remote(), timeout=START_S)

    runs = [Path(setup.directory)]
    first, _ = patiently(lambda: job(setup, 2), runs, "2 steps in Ray actors")
    unnamed = setup.on(mbridge_config={})
    second, resumed = patiently(lambda: job(unnamed, 4, **{VARIABLE: SAFE}), runs, "4 steps in Ray actors")
    assert not first & second
    for through, again in zip(whole, resumed, strict=True):
        assert again["from"] == 2
        assert again["losses"] == {number: through["losses"][number] for number in (3, 4)}
        assert again["end"] == through["end"]
    assert all("manifest.json" in files for files in cases.directories(setup).values())
    assert list(cases.directories(setup)) == ["global_step_2", "global_step_4"]

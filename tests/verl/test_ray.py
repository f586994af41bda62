"""The same through Ray: actors save, are killed, and others repeat the uninterrupted run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.testing.modules import is_installed
from mbridge_fsdp_ckpt.testing.process import rank_environment
from mbridge_fsdp_ckpt.testing.ranks import RankPool
from mbridge_fsdp_ckpt.verl.choice import VARIABLE
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


@pytest.mark.timeout(2 * (START_S + CASE_S))
def test_killed_actors_are_followed_by_others_that_repeat_the_run(
    source: str, ray_runtime: Any, verl_ranks: RankPool, tmp_path: Path
) -> None:
    """The first job chooses the format by an override, the second by the environment variable."""
    ray, setup = ray_runtime, Setup(source, str(tmp_path / "run"))
    whole = verl_ranks.run(cases.train, setup.on(directory=str(tmp_path / "whole")), 4)

    first = start(ray)
    processes = ray.get([actor.process.remote() for actor in first], timeout=START_S)
    assert all(loaded for _, loaded in processes), "importing verl did not load the plug-in"
    ray.get([actor.train.remote(setup, 2, (2,)) for actor in first], timeout=CASE_S)
    for actor in first:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.be_killed.remote(), timeout=CASE_S)

    second = start(ray, **{VARIABLE: SAFE})
    others = ray.get([actor.process.remote() for actor in second], timeout=START_S)
    assert not {process for process, _ in processes} & {process for process, _ in others}
    resumed = ray.get([actor.train.remote(setup.on(mbridge_config={}), 4, (4,)) for actor in second], timeout=CASE_S)
    for through, again in zip(whole, resumed, strict=True):
        assert again["from"] == 2
        assert again["losses"] == {number: through["losses"][number] for number in (3, 4)}
        assert again["end"] == through["end"]
    assert all("manifest.json" in files for files in cases.directories(setup).values())
    assert list(cases.directories(setup)) == ["global_step_2", "global_step_4"]

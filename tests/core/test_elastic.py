# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""torchrun restarts jobs that lost a rank or a node, or got one more: they go on from the last commit."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240


@contextmanager
def agent(node: str, root: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An agent of torchrun with one worker; with its workers it is killed at the end, if it still runs."""
    rendezvous = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,timeout=120"
    options = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.2"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    options += ["--rdzv-conf", rendezvous, "--local-addr", "127.0.0.1"]
    with (root / f"output-{node}").open("wb") as output:
        # Otherwise torch 2.13 gives later attempts the store of the first one, and gloo the addresses of dead ranks.
        running = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.core.elastic_nodes", str(root)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "NODE": node},
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            yield running
        finally:
            end(running)


def end(agent: subprocess.Popen[bytes]) -> None:
    """End a node: torchrun's workers are sessions of their own."""
    found = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=False)
    for process in (agent.pid, *map(int, found.stdout.split())):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    agent.wait()


@pytest.mark.timeout(2 * LIMIT_S)
def test_nodes_that_restart_come_and_go_meet_again(tmp_path: Path) -> None:
    """Each agent counts the restarts that it knows of: they differ from the first killed worker on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def lines() -> list[tuple[str, int, int, int]]:
        log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
        found = re.findall(r"node (\w) restart (\d+) world (\d+) step (\d+)", log)
        return [(node, int(restart), int(world), int(step)) for node, restart, world, step in found]

    def wait_for(what: Callable[[list[tuple[str, int, int, int]]], bool], why: str) -> None:
        since, until = len(lines()), time.monotonic() + LIMIT_S / 2
        while not what(lines()[since:]):
            if time.monotonic() > until:
                outputs = [path.read_text()[-3000:] for path in sorted(tmp_path.glob("output-*"))]
                raise AssertionError(f"{why}; {lines()[-6:]}\n" + "\n".join(outputs))
            time.sleep(0.1)

    def two_more(world: int) -> Callable[[list[tuple[str, int, int, int]]], bool]:
        return lambda new: len({step for _, _, size, step in new if size == world}) >= 2

    with ExitStack() as stack:
        agents = [stack.enter_context(agent(node, tmp_path, port)) for node in "AB"]
        wait_for(two_more(2), "two nodes train")
        (tmp_path / "kill-A").touch()
        wait_for(lambda new: not list(tmp_path.glob("kill-*")) and two_more(2)(new), "A's worker was killed")
        assert {restart for _, restart, _, _ in lines()[-2:]} != {0}
        third = stack.enter_context(agent("C", tmp_path, port))
        wait_for(two_more(3), "a third node trains, too")
        end(third)  # its worker dies with it, as any that is not of the store's node
        wait_for(two_more(2), "two nodes train again")
        (tmp_path / "stop").touch()
        assert [one.wait(LIMIT_S / 2) for one in agents] == [0, 0]
    restarts = [{node: restart for node, restart, world, _ in lines() if world == 2}[node] for node in "AB"]
    assert len(restarts) == 2
    steps = [step for *_, step in lines()]
    for node in "ABC":
        own = [step for name, _, _, step in lines() if name == node]
        assert own == sorted(set(own)), "no step whose commit was told is made again"
    # A worker that ends between a commit and its line leaves no line of that step: one, where ranks restart.
    assert all(later - earlier in (0, 1, 2) for earlier, later in itertools.pairwise(steps)), "no step is left out"

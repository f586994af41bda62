"""torchrun restarts a job that lost a rank in the middle of a save: it goes on from the last commit, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.testing.ranks import RankPool
from tests.core import elastic_job

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240


def torchrun(root: Path, deadly: int) -> tuple[str, str]:
    """Train for four steps on two ranks, of which one dies in a save; the output, and what was live at the end."""
    root.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.core.elastic_job", str(root), "4", str(deadly)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        # Otherwise torch 2.13 gives the second attempt the first one's store, and gloo the addresses of dead ranks.
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout, json.loads((root / "end.json").read_text())


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_restarted_job_goes_on_from_the_last_commit(megatron_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (undisturbed, _) = megatron_ranks.run(elastic_job.train, tmp_path / "undisturbed", 4, ranks=2)
    output, end = torchrun(tmp_path / "killed", 3)
    assert output.count("attempt 0 begins after step 0") == 2
    assert output.count("attempt 1 begins after step 2") == 2
    assert end == json.loads(json.dumps(undisturbed))
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["end.json", "iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]

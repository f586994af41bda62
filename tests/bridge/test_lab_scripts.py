# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The lab's scripts run unmodified, in every layout that their options allow: all by `make test-all`, else one.

They lie beside the checkout, in ../shared/lab; where they don't, the tests skip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import sampling
from tests.upstream import is_before

LAB = Path(__file__).parents[3] / "shared" / "lab"
PLUGIN = ("--plugin", "mbridge_fsdp_ckpt", "--format", "fsdp_dtensor_safe")
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")
HANG_S = 150

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(not LAB.is_dir(), reason="the lab's scripts are not beside this checkout"),
    pytest.mark.timeout(4 * HANG_S),
]

TRAINING = {
    "1 rank": (1, "--experts 4"),
    "EP 2, TP 2": (4, "--experts 4 --tp 2 --ep 2"),
    "dense": (2, "--tp 2"),
    "no GDN, 4 layers": (2, "--layers 4 --experts 8 --no-gdn --hidden 32"),
    "no_shard": (2, "--experts 4 --strategy no_shard"),
    "optim": (2, "--experts 4 --strategy optim"),
    "optim_grads": (2, "--experts 4 --strategy optim_grads --offload 0.5"),
    "hybrid, outer replicated": (4, "--experts 4 --instances 2"),
    "hybrid, outer sharded": (4, "--experts 4 --instances 2 --outer optim"),
    "offload 1.0": (4, "--experts 4 --ep 2 --offload 1.0"),
    "offload 0.5": (2, "--experts 4 --offload 0.5"),
    "no optimizer": (2, "--experts 4 --no-save-optim"),
}

CONVERSION: list[tuple[int, str]] = [(1, "--tp 1 --ep 1"), (4, "--tp 2 --ep 2"), (4, "--tp 1 --ep 4")]

PIPELINE = "2 pipeline stages"

DRAWN = sampling.drawn("lab", [PIPELINE, *TRAINING, *CONVERSION], share=len(TRAINING))
"""Each starts processes that import everything: one case of all, by default."""


def start(ranks: int, script: str, *arguments: str) -> str:
    """Run a lab script on some ranks; its output.

    gloo sometimes locks up Megatron-FSDP's overlapped collectives in a training step when the machine is busy, with
    stock too: such a run is tried once more.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(LAB / script)]
    for attempt in (1, 2):
        try:
            done = subprocess.run(
                [sys.executable, *command, *arguments],
                capture_output=True,
                text=True,
                timeout=HANG_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
            continue
        if attempt == 1 and "(SIG" in done.stderr and "mbridge_fsdp_ckpt.errors" not in done.stderr:
            continue  # a process was killed by a signal
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout
    raise AssertionError("not reached")


def losses(output: str) -> dict[str, str]:
    return dict(LOSS.findall(output))


@pytest.mark.parametrize("case", DRAWN)
def test_the_lab_scripts(case: str | tuple[int, str], tmp_path: Path) -> None:
    if case == PIPELINE:
        pipeline_sizes_that_megatron_fsdp_refuses_stay_refused(tmp_path)
    elif isinstance(case, str):
        bridge_train(*TRAINING[case], tmp_path)
    else:
        bridge_convert(*case, tmp_path)


def skip_training_before_core_0_19() -> None:
    if is_before("megatron-core", "0.19"):
        pytest.skip("the script imports megatron.core.ssm.gated_delta_net.common, which Megatron-Core 0.18 has not")


def bridge_train(ranks: int, options: str, tmp_path: Path) -> None:
    """Three iterations; then, from the second on, again."""
    skip_training_before_core_0_19()
    arguments = ("--dir", str(tmp_path), "--iters", "3", "--save-every", "2", *PLUGIN, *options.split())
    whole = start(ranks, "bridge_train.py", *arguments)
    assert whole.count("SAVE seconds=") == 2
    assert "PREPROCESS" not in whole
    assert set(re.findall(r"SAVE .*collectives=(\d+)", whole)) == {"0"}
    shutil.rmtree(tmp_path / "iter_0000003")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = start(ranks, "bridge_train.py", *arguments)
    assert resumed.count("LOAD seconds=") == 1
    assert list(losses(resumed)) == ["3"]
    if "--no-save-optim" not in options:  # a fresh optimizer takes another step
        assert losses(resumed)["3"] == losses(whole)["3"]


def pipeline_sizes_that_megatron_fsdp_refuses_stay_refused(tmp_path: Path) -> None:
    skip_training_before_core_0_19()
    with pytest.raises(AssertionError, match=r"pipeline|mesh|Mesh|rearrange|shape"):
        start(2, "bridge_train.py", "--dir", str(tmp_path), "--pp", "2", "--layers", "4", *PLUGIN)


def bridge_convert(ranks: int, layout: str, tmp_path: Path) -> None:
    if is_before("megatron-bridge", "0.6"):
        pytest.skip("Megatron-Bridge 0.5 looks for the experts of the script's model under another name")
    made = [sys.executable, str(LAB / "make_tiny_qwen35.py"), str(tmp_path / "hf")]
    subprocess.run(made, check=True, capture_output=True, timeout=HANG_S)
    output = start(ranks, "bridge_convert.py", str(tmp_path / "hf"), str(tmp_path / "out"), *layout.split(), *PLUGIN)
    assert output.count("DONE") == ranks
    names = {path.name for path in (tmp_path / "out" / "iter_0000000").iterdir()}
    assert {"manifest.json", ".metadata", "__0_0.distcp", "run_config.yaml", "train_state.pt"} <= names

"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.storage.manifest import write_manifest
from mbridge_fsdp_ckpt.storage.schema import FORMAT, VERSION, KeyEntry, Manifest

FUSED = {
    "model.mlp.linear_fc1.weight_w": ("gated_linear_unit/1", "w"),
    "model.mlp.linear_fc1.weight_v": ("gated_linear_unit/1", "v"),
    "model.attention.in_proj.weight.query": ("gated_delta_net/1", "query"),
    "model.attention.linear_q_down_proj.weight": ("latent_attention/1", "linear_q_down_proj"),
    "model.norm.weight": (None, ""),
    "optimizer.state.mlp.linear_fc1.weight_w.exp_avg": ("gated_linear_unit/1", "w"),
}
CLAIMED = {
    "gated_delta_net/1": {"attention.in_proj.weight": ["query"]},
    "gated_linear_unit/1": {"mlp.linear_fc1.weight": ["w", "v"]},
    "latent_attention/1": {"attention.linear_q_down_proj.weight": ["linear_q_down_proj"]},
}


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its output goes to a pipe."""
    environment = {"COLUMNS": str(columns), "PATH": "", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mbridge_fsdp_ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's root whose tracker names iteration 10."""
    directory = tmp_path / "iter_0000010"
    directory.mkdir()
    keys = {key: KeyEntry(dtype="float32", shape=(4,), family=f, component=c) for key, (f, c) in FUSED.items()}
    head = Manifest(
        format=FORMAT, version=VERSION, writer={}, topology={}, sections=("model",), keys=keys, tables=(), values={}
    )
    write_manifest(directory / "manifest.json", head)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    return tmp_path


def test_families_lists_what_is_installed_with_its_class() -> None:
    found = run("families")
    assert (found.returncode, found.stderr) == (0, "")
    assert [line.split()[0] for line in found.stdout.splitlines() if line[0] != " "] == [
        "family",
        *default_registry().names,
    ]
    assert "".join(found.stdout.split()).count("mbridge_fsdp_ckpt.families.mamba.MambaFamily") == 1
    assert all(len(line) <= 80 for line in found.stdout.splitlines())
    rows = json.loads(run("families", "--json").stdout)
    assert {row["family"]: row["version"] for row in rows} == dict.fromkeys(default_registry().names, 1)


@pytest.mark.parametrize("inside", ["", "iter_0000010"])
def test_families_of_a_checkpoint_are_the_parameters_that_each_split(root: Path, inside: str) -> None:
    assert json.loads(run("families", str(root / inside), "--json").stdout) == CLAIMED
    shown = run("families", str(root / inside), columns=200).stdout
    assert shown.split()[:3] == ["family", "parameter", "components"]
    for family, parameters in CLAIMED.items():
        (parameter, components), *_ = parameters.items()
        assert any(line.split() == [family, parameter, *components] for line in shown.splitlines()), shown


@pytest.mark.parametrize(
    ("content", "says"),
    [("11", "found '11'"), ("../elsewhere", "found '../elsewhere'"), ("", "found ''"), ("release", "found 'release'")],
)
def test_a_tracker_that_names_nothing_is_an_error_of_one_line(root: Path, content: str, says: str) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text(content)
    found = run("families", str(root))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("NotACheckpointError: ")
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    found = run("families", str(tmp_path / "nothing"))
    assert found.returncode == 1
    assert "no such directory" in found.stderr


@pytest.mark.parametrize("arguments", [("famlies",), ("families", "--jason"), ("families", "a", "b")])
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert "Usage" in found.stderr

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from mbridge_fsdp_ckpt.families import default_registry
from mbridge_fsdp_ckpt.format.names import FORMAT_NAME, Files
from mbridge_fsdp_ckpt.format.own_index import RankIndex
from mbridge_fsdp_ckpt.format.rows import Chunk
from mbridge_fsdp_ckpt.format.schema import VERSION, Manifest
from mbridge_fsdp_ckpt.format.write_results import write_own_index
from mbridge_fsdp_ckpt.io.entries import FileEntry
from mbridge_fsdp_ckpt.io.ranges import ByteRange
from mbridge_fsdp_ckpt.plan.boxes import Box
from mbridge_fsdp_ckpt.plan.keys import KeyEntry
from mbridge_fsdp_ckpt.tools.command import console as frame
from mbridge_fsdp_ckpt.tools.command import convert, diff, estimate, families, inspect, prune, repair, timeline, verify
from mbridge_fsdp_ckpt.tools.command import run as run_command
from tests.unit.handmade import write_manifest

SUBCOMMANDS = [convert, diff, families, inspect, prune, estimate, repair, run_command, timeline, verify]

SURFACE = {
    "convert": [],
    "diff": ["--atol", "--json", "--key", "--no-values", "--rtol", "--values", "a", "b"],
    "families": ["--json", "checkpoint"],
    "inspect": ["--html", "--json", "--key", "checkpoint"],
    "prune": ["--dry-run", "--json", "--keep", "--yes", "-y", "root"],
    "estimate": [
        "--cp", "--ep", "--etp", "--host-read", "--host-write", "--json", "--main-weights", "--moments", "--offload",
        "--optimizer", "--outer", "--outer-strategy", "--picture", "--pp", "--ranks-per-host",
        "--storage-read", "--storage-write", "--strategy", "--to", "--tp", "--world", "model",
    ],
    "repair": ["--dry-run", "--force", "--json", "--stock-view", "--yes", "-y", "root"],
    "run": ["--module", "--takeover", "-m", "command"],
    "timeline": ["--html", "--json", "checkpoint"],
    "verify": ["--header", "--json", "--workers", "checkpoint"],
}  # fmt: skip

CONVERT_SURFACE = {
    "export": [
        "--ckpt-format", "--cp", "--distributed-save", "--ep", "--etp", "--hf-model", "--hf-path", "--megatron-path",
        "--no-progress", "--not-strict", "--save-every-n-ranks", "--torch-dtype", "--tp", "--trust-remote-code",
    ],
    "from-stock": ["--json", "destination", "source"],
    "from-torch-dist": ["--json", "--trust-run-config", "destination", "source"],
    "import": [
        "--ckpt-format", "--cp", "--ep", "--etp", "--hf-model", "--megatron-path", "--no-low-memory-save",
        "--not-strict", "--torch-dtype", "--tp", "--trust-remote-code",
    ],
    "reshard": ["--json", "--merge-ranks", "--ranks", "destination", "source"],
    "to-stock": ["--json", "destination", "source"],
}  # fmt: skip

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
    "gated_linear_unit/1": {"mlp.linear_fc1.weight": ["v", "w"]},
    "latent_attention/1": {"attention.linear_q_down_proj.weight": ["linear_q_down_proj"]},
}


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its output goes to a pipe."""
    environment = {"COLUMNS": str(columns), "PATH": "", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mbridge_fsdp_ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def call(*arguments: Any, columns: int = 80, answer: str | None = None) -> Result:
    """The command in this process: quicker."""
    result = CliRunner().invoke(
        frame.app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)}, input=answer
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def data(*arguments: Any, code: int = 0) -> Any:
    """What it prints with --json."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's root whose tracker names iteration 10."""
    directory = tmp_path / "iter_0000010"
    directory.mkdir()
    keys = {key: KeyEntry(dtype="float32", shape=(4,), family=f, component=c) for key, (f, c) in FUSED.items()}
    files, payload = Files("0123456789ab"), FileEntry(name="__0_0.distcp", size=16, checksum="xxh3_64:0")
    rows = [Chunk(key, Box((0,), (4,)), ByteRange(0, 16), 0, 16, 0) for key in keys]
    told = write_own_index(directory, files, RankIndex(0, {"rank": 0}, payload, keys), rows, {})
    metadata = Manifest.model_validate(
        {
            "format": FORMAT_NAME,
            "version": VERSION,
            "save": files.save,
            "writer": {},
            "topology": {},
            "sections": ("model",),
            "families": told["families"],
            "keys": len(keys),
            "chunks": len(keys),
            "index": told["pending"],
            "values": {},
        }
    )
    write_manifest(directory / "manifest.json", metadata)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    return tmp_path


def test_the_surface_is_frozen() -> None:
    """A change here breaks somebody's script: say so in the changelog."""
    group: Any = get_command(frame.app)
    assert options_of(group) == SURFACE
    assert options_of(group.commands["convert"]) == CONVERT_SURFACE
    assert len(SUBCOMMANDS) == len(SURFACE)


def options_of(group: Any) -> dict[str, list[str]]:
    return {
        name: sorted(
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option != "--help"
        )
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("name", ["", *SURFACE])
def test_help_fits_80_columns_and_tells_the_exit_codes(name: str) -> None:
    shown = call(*[name] if name else [], "--help")
    assert shown.exit_code == 0
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    assert "Exit codes: 0 done; 1 a named error" in shown.stdout
    assert "130 interrupted" in " ".join(shown.stdout.split())


def test_families_lists_what_is_installed_with_its_class() -> None:
    found = run("families")
    assert (found.returncode, found.stderr) == (0, "")
    assert [line.split()[0] for line in found.stdout.splitlines() if line[0] != " "] == [
        "family",
        *default_registry().names,
    ]
    assert "".join(found.stdout.split()).count("mbridge_fsdp_ckpt.families.mamba.MambaFamily") == 1
    assert all(len(line) <= 80 for line in found.stdout.splitlines())
    rows = data("families")
    assert {row["family"]: row["version"] for row in rows} == dict.fromkeys(default_registry().names, 1)


@pytest.mark.parametrize("inside", ["", "iter_0000010"])
def test_families_of_a_checkpoint_are_the_parameters_that_each_split(root: Path, inside: str) -> None:
    assert data("families", root / inside) == CLAIMED
    shown = call("families", root / inside, columns=200).stdout
    assert shown.split()[:3] == ["family", "parameter", "components"]
    for family, parameters in CLAIMED.items():
        (parameter, components), *_ = parameters.items()
        assert any(line.split() == [family, parameter, *components] for line in shown.splitlines()), shown


@pytest.mark.parametrize("subcommand", ["families", "inspect", "verify"])
def test_a_tracker_that_names_nothing_is_an_error_of_one_line(root: Path, subcommand: str) -> None:
    """All that a tracker may say is in test_trackers.py."""
    (root / "latest_checkpointed_iteration.txt").write_text("11")
    found = call(subcommand, root)
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("NotACheckpointError: ")
    assert "expected iter_0000011, which latest_checkpointed_iteration.txt names; found iter_0000010." in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("families",), ("inspect",), ("verify",), ("prune", "--keep", 1), ("repair",)])
def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    found = call(*arguments, tmp_path / "nothing")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "no such directory" in found.stderr


def test_an_error_in_a_process_of_its_own_is_one_line_without_colour(tmp_path: Path) -> None:
    found = run("verify", str(tmp_path / "nothing"))
    assert (found.returncode, found.stdout) == (1, "")
    assert len(found.stderr.splitlines()) == 1
    assert "\x1b" not in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("famlies",),
        ("families", "--jason"),
        ("families", "a", "b"),
        ("diff", "a"),
        ("diff", "a", "b", "--rtol", "-1"),
        ("diff", "a", "b", "--rtol", "nan"),
        ("prune", "root"),
        ("prune", "root", "--keep", "0"),
        ("verify", "a", "--workers", "0"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    found = call(*arguments)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "Usage" in found.stderr


def test_what_the_storage_refuses_is_a_named_error(root: Path) -> None:
    found = call("inspect", root, "--html", root / "no" / "such" / "page.html")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("StorageError: ")
    assert "page.html" in found.stderr

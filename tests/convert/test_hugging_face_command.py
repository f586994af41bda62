# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`mbridge_fsdp_ckpt convert import | export` as a user types it: alone, under torchrun, and with mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.format.names import MANIFEST_NAME
from mbridge_fsdp_ckpt.tools.command import convert
from mbridge_fsdp_ckpt.tools.command import verify as _verify  # noqa: F401
from mbridge_fsdp_ckpt.tools.command.console import app
from testing.process import rank_environment
from testing.ranks import RankPool
from tests.convert import hugging_face_runs as runs
from tests.soak import sampling

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
HANG_S = 280


def documented() -> list[str]:
    """The page's command lines, each in one line."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("#")[0].split()) for line in lines if line.strip()]


def typed(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own."""
    environment = rank_environment() | {"COLUMNS": "80", "NO_COLOR": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        line, shell=True, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=HANG_S
    )


def called(*arguments: str) -> tuple[int, str]:
    """`convert` in this process."""
    result = CliRunner().invoke(app, ["convert", *arguments], env={"COLUMNS": "80"})
    return result.exit_code, result.stderr


@pytest.mark.bridge
@pytest.mark.timeout(3 * HANG_S)
def test_the_documented_commands_do_what_the_page_says(bridge_ranks: RankPool, tmp_path: Path) -> None:
    assert bridge_ranks.run(runs.write_model, "Qwen3-MoE", str(tmp_path / "Qwen3-30B-A3B"), ranks=1) == [True]
    (tmp_path / "convert_checkpoints_fsdp.py").write_text(runs.SCRIPT.read_text())
    first, *exports = [line for line in documented() if " convert " in line]
    by_folder = {line.partition("--hf-path ")[2].split()[0]: line for line in exports}
    assert list(by_folder) == ["exported", "exported-tp2"]
    exported = sampling.drawn("documented exports", list(by_folder), share=2)
    for line in (first, *(by_folder[name] for name in exported)):
        done = typed(line, tmp_path)
        assert done.returncode == 0, (line, done.stdout + done.stderr[-3000:])
        assert "Traceback" not in done.stderr
    original = str(tmp_path / "Qwen3-30B-A3B")
    for name in exported:
        assert runs.differences(original, str(tmp_path / name), exact=True) == []
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "checkpoint")]).exit_code == 0


def test_the_page_names_every_option() -> None:
    options = {
        option
        for verb in ("import", "export")
        for option in re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["convert", verb, "--help"]).stdout)
    }
    assert "--not-strict" in options
    assert {option for option in options if option not in PAGE.read_text()} == set()


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that looks like a Hugging Face model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("import --hf-model {0}/none --megatron-path {0}/new", "ConfigurationError", "no such directory"),
        (
            "import --hf-model {0} --megatron-path {0}/new",
            "ConfigurationError",
            "config.json; found a directory without it",
        ),
        ("import --hf-model {0}/model --megatron-path {0}", "ConfigurationError", "new, or empty; found files in it"),
        (
            "import --hf-model {0}/model --megatron-path {0}/new --ckpt-format fsdp_dtensor_saef",
            "UnknownFormatError",
            "Did you mean 'fsdp_dtensor_safe'?",
        ),
        ("import --hf-model {0}/model --megatron-path {0}/new --ckpt-format fsdp_dtensor", "UnknownFormat", "to-stock"),
        ("import --hf-model {0}/model --megatron-path {0}/new --tp 2", "ConfigurationError", "--nproc-per-node 2"),
        ("export --hf-model {0}/model --megatron-path {0}/none --hf-path {0}/new", "NotACheckpoint", "no such direct"),
        (
            "export --hf-model {0}/model --megatron-path {0} --hf-path {0}/new",
            "NotACheckpointError",
            "a checkpoint in the format",
        ),
        ("export --hf-model {0}/model --megatron-path {0}/none --hf-path {0}", "ConfigurationError", "new, or empty"),
        ("export --hf-model {0}/model --megatron-path {0}/none --hf-path memory://new", "Configuration", "file system"),
        ("export --hf-model {0}/model --megatron-path {0}/none --hf-path=", "ConfigurationError", "an empty path"),
        ("export --hf-model= --megatron-path {0}/none --hf-path {0}/new", "ConfigurationError", "an empty path"),
        ("import --hf-model= --megatron-path {0}/new", "ConfigurationError", "an empty path"),
        ("import --hf-model {0}/model --megatron-path=", "ConfigurationError", "an empty path"),
    ],
)
def test_mistakes_are_named_in_one_line_before_anything_is_imported(
    line: str, error: str, says: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "model")  # which an empty path would be
    code, printed = called(*line.format(tmp_path).split())
    assert code == 2
    assert printed.startswith(error)
    assert says in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_what_a_killed_import_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".staging-iter_0000000-0123456789ab").mkdir()
    convert._check_is_new(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigurationError, match="new, or empty"):
        convert._check_is_new(tmp_path)


def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    line = f"convert import --hf-model {tmp_path}/none --megatron-path {tmp_path}/new"
    done = typed(f"torchrun --nproc-per-node 2 -m mbridge_fsdp_ckpt {line}", tmp_path)
    assert done.stderr.count("ConfigurationError: ") == 1
    assert "(exitcode: 2) local_rank: 0" in done.stderr


def test_a_rank_that_fails_alone_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(convert, "GRACE_S", 0.0)
    code, printed = called("import", "--hf-model", "/none", "--megatron-path", str(tmp_path / "new"))
    assert code == 2
    assert printed.startswith("ConfigurationError: ")


def refused(line: list[str]) -> tuple[int, str]:
    """`convert` on a rank, as on a machine without CUDA."""
    os.environ.pop("LOCAL_RANK")
    with runs.begun_anew(), runs.without_cuda():
        return called(*line)


@pytest.mark.bridge
@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        (3, ("--tp", "3"), "Given: TP 3, CP 1, EP 1, 3 ranks."),
        (2, ("--ep", "2"), "Given: TP 1, CP 1, EP 2, 2 ranks."),
    ],
)
def test_sizes_that_do_not_fit_the_model(
    ranks: int, options: tuple[str, ...], says: str, bridge_ranks: RankPool, tmp_path: Path
) -> None:
    source, target = str(tmp_path / "model"), str(tmp_path / "new")
    bridge_ranks.run(runs.write_model, "Qwen3", source, ranks=1)
    line = ["import", "--hf-model", source, "--megatron-path", target, *options]
    for code, printed in bridge_ranks.run(refused, line, ranks=ranks):
        assert code == 2, printed
        assert "ConfigurationError" in printed
        assert says in printed
    assert not Path(target).exists()


@pytest.mark.bridge
def test_a_model_that_bridge_does_not_know(bridge_ranks: RankPool, tmp_path: Path) -> None:
    source = str(tmp_path / "model")
    assert bridge_ranks.run(runs.write_model, "Mixtral", source, ranks=1) == [False]
    line = ["import", "--hf-model", source, "--megatron-path", str(tmp_path / "new")]
    ((code, printed),) = bridge_ranks.run(refused, line, ranks=1)
    assert code == 2
    assert "a Hugging Face model that the installed Megatron-Bridge knows" in printed
    assert "MixtralForCausalLM" in printed


def convert_in_other_ways(source: str, folder: str) -> None:
    """A model without a tokenizer, files of each rank's own, and another precision."""
    with runs.without_cuda():
        runs.command("import", source, f"{folder}/checkpoint")
        own = ["--distributed-save", "--save-every-n-ranks", "2", "--no-progress"]
        runs.command("export", source, f"{folder}/checkpoint", "--hf-path", f"{folder}/distributed", *own)
        wide = ["--torch-dtype", "float32"]
        runs.command("export", source, f"{folder}/checkpoint", "--hf-path", f"{folder}/wide", *wide)


@pytest.mark.bridge
def test_other_ways_to_convert(bridge_ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "model"
    bridge_ranks.run(runs.write_model, "Qwen3", str(source), ranks=1)
    for file in source.glob("tokenizer*"):
        file.unlink()
    bridge_ranks.run(convert_in_other_ways, str(source), str(tmp_path), ranks=2)
    assert (tmp_path / "checkpoint" / "iter_0000000" / MANIFEST_NAME).is_file()
    assert runs.differences(str(source), str(tmp_path / "distributed"), exact=True) == []
    assert runs.differences(str(source), str(tmp_path / "wide"), exact=False) == []
    assert all("float32" in text for text in runs.differences(str(source), str(tmp_path / "wide"), exact=True))
    assert runs.differences(str(source), str(tmp_path / "wide"), exact=True)

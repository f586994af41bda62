# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""An import or export accounts for every tensor on both sides, and leaves nothing where it fails.

Whole imports of one family; `test_imports` fills every family's model from files with every tensor otherwise.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from testing.ranks import RankPool
from tests.convert import hugging_face_runs as runs
from tests.models.test_real_models import not_in_bridge

pytestmark = pytest.mark.bridge

Tensors = dict[str, torch.Tensor]


def tensors_in(directory: Path) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def changed(source: str, target: Path, change: Callable[[Tensors], Any]) -> str:
    """A copy of a model with other tensors."""
    from safetensors.torch import save_file

    shutil.copytree(source, target)
    tensors = tensors_in(target)
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return str(target)


def in_two_files(source: str, target: Path) -> str:
    """A copy whose tensors lie in two files, the second of which is not there."""
    from safetensors.torch import save_file

    shutil.copytree(source, target)
    tensors = tensors_in(target)
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, target / file, {"format": "pt"})
    where = {name: file for file, held in halves.items() for name in held}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (target / "model-2-of-2.safetensors").unlink()
    return str(target)


def said(*line: str) -> tuple[int, str, str]:
    """`convert`, as on a machine without CUDA: exit code, what it said in the end, and its error."""
    from typer.testing import CliRunner

    from mbridge_fsdp_ckpt.tools.command import convert  # noqa: F401
    from mbridge_fsdp_ckpt.tools.command.console import app

    with runs.begun_anew(), runs.without_cuda():
        done = CliRunner().invoke(app, ["convert", *line], env={"COLUMNS": "80"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def of_imports(folder: str) -> dict[str, Any]:
    """What imports of models say whose tensors are not those of the model."""
    root, source = Path(folder), f"{folder}/whole"
    runs.write_model("Qwen3-MoE", source)
    some = {
        "a projection": "model.layers.1.self_attn.k_proj.weight",
    }
    found: dict[str, Any] = {}
    models = {what: changed(source, root / what, without(name)) for what, name in some.items()}
    models["an additional tensor"] = changed(
        source, root / "more", lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(2)})
    )
    models["another shape"] = changed(
        source, root / "shape", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})
    )
    models["no number"] = changed(source, root / "nan", lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    models["a shard"] = in_two_files(source, root / "shard")
    for what, model in models.items():
        found[what] = said("import", "--hf-model", model, "--megatron-path", f"{folder}/new")
        assert not (root / "new").exists() or not any((root / "new").iterdir()), what

    def enlarge(tensors: Tensors) -> None:
        """And repeat what heads for multi-token prediction share, as published models do."""
        tensors["model.norm.weight"].fill_(1e5)
        tensors["model.layers.9.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.9.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    large = changed(source, root / "large", enlarge)
    line = ("import", "--hf-model", large, "--megatron-path", f"{folder}/new", "--torch-dtype")
    found["an overflow"] = said(*line, "float16")
    found["no overflow"] = said(*line, "bfloat16")
    more = ("import", "--hf-model", models["an additional tensor"], "--megatron-path", f"{folder}/lenient")
    found["not strict"] = said(*more, "--not-strict")
    return found


def test_an_import_accounts_for_every_tensor(bridge_ranks: RankPool, tmp_path: Path) -> None:
    [found] = bridge_ranks.run(of_imports, str(tmp_path), ranks=1)
    says = {
        "a projection": "KeyMismatchError: .*model.layers.1.self_attn.k_proj.weight.*linear_qkv.weight",
        "an additional tensor": "KeyMismatchError: .*model.layers.0.extra.weight.*--not-strict",
        "another shape": "ConfigurationError: .*model.norm.weight",
        "no number": "DamagedCheckpointError: .*NaN or infinite.*model.norm.weight",
        "a shard": "DamagedCheckpointError: .*model-2-of-2.safetensors.*no such file",
        "an overflow": "ConfigurationError: .*--torch-dtype.*model.norm.weight.*decoder.final_layernorm.weight",
    }
    for what, text in says.items():
        code, _, error = found.pop(what)
        assert code in (1, 2), what
        assert len(error.splitlines()) == 1, error
        assert re.match(text, error), (what, error)
    assert {code for code, _, _ in found.values()} == {0}, found
    assert "1 left out, without a place in the model: model.layers.0.extra.weight." in found["not strict"][1]


def of_wrong_inputs(folder: str) -> dict[str, Any]:
    """What imports say of directories that are no whole model, by what is wrong; and what they left."""
    root, source = Path(folder), Path(folder, "whole")
    runs.write_model("Qwen3", str(source))
    runs.write_model("Qwen3-MoE", str(root / "other"))

    def truncate(place: Path) -> None:
        file = place / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])

    def empty(place: Path) -> None:
        (place / "model.safetensors").write_bytes(b"")

    def name_absent_files(place: Path) -> None:
        (place / "model.safetensors").unlink()
        index = {"weight_map": dict.fromkeys(tensors_in(source), "model-1-of-1.safetensors")}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))

    def a_broken_index(place: Path) -> None:
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text("{")

    changes: dict[str, Callable[[Path], Any]] = {
        "truncated": truncate,
        "empty file": empty,
        "absent files": name_absent_files,
        "broken index": a_broken_index,
        "no files": lambda place: (place / "model.safetensors").unlink(),
        "another model": lambda place: shutil.copy(root / "other" / "config.json", place),
        "broken configuration": lambda place: (place / "config.json").write_text("{"),
        "no configuration": lambda place: (place / "config.json").unlink(),
    }
    found: dict[str, Any] = {}
    for what, change in changes.items():
        place = root / what
        shutil.copytree(source, place)
        change(place)
        found[what] = said("import", "--hf-model", str(place), "--megatron-path", f"{folder}/new")
    found["a file"] = said("import", "--hf-model", str(source / "config.json"), "--megatron-path", f"{folder}/new")
    below = str(source / "config.json" / "new")
    found["below a file"] = said("import", "--hf-model", str(source), "--megatron-path", below)
    assert not (root / "new").exists() or not any((root / "new").iterdir())
    found["again"] = said("import", "--hf-model", str(source), "--megatron-path", f"{folder}/new")
    return found | failed_exports(root, source)


def failed_exports(root: Path, source: Path) -> dict[str, Any]:
    """The same of exports; what they left, or changed in the checkpoint, is added to what they say."""
    from megatron.bridge import AutoBridge

    checkpoint, cut = root / "new", Path(shutil.copytree(root / "new", root / "cut"))
    for payload in cut.rglob("*.distcp"):
        payload.write_bytes(payload.read_bytes()[:-1])
    before, found = content(checkpoint), dict[str, Any]()

    def export(what: str, to: str = "deep/exported", model: Path = source, of: Path = checkpoint) -> None:
        names = sorted(path.name for path in root.iterdir())
        line = ("--hf-model", str(model), "--megatron-path", str(of), "--hf-path", str(root / to))
        code, out, error = said("export", *line)
        left = set(root.iterdir()) - {root / name for name in names}
        wrong = [*map(str, left), *([] if content(checkpoint) == before else ["the checkpoint is another"])]
        found[f"export: {what}"] = code, out, error + "".join(f"\n{one}" for one in wrong)

    export("cut shard", of=cut)
    export("another architecture", model=root / "other")
    export("below a file", "whole/config.json/exported")
    with patch.object(AutoBridge, "save_hf_pretrained", side_effect=KeyboardInterrupt):
        export("interrupted")
    (root / "disk").mkdir()
    if not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", root / "disk"], check=False).returncode:
        export("full disk", "disk/deep/exported")
        found["export: full disk"] += ([path.name for path in (root / "disk").iterdir()],)
        subprocess.run(["umount", "-l", root / "disk"], check=True)
    return found


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_wrong_inputs_are_one_named_line_and_leave_nothing(bridge_ranks: RankPool, tmp_path: Path) -> None:
    [found] = bridge_ranks.run(of_wrong_inputs, str(tmp_path), ranks=1)
    assert found.pop("again")[0] == 0
    code, _, left = found.pop("export: interrupted")
    assert (code, left) == (130, "")
    if full := found.pop("export: full disk", None):
        code, _, error, left = full
        assert (code, left) == (1, [])
        assert re.match("StorageError: .*exporting to .*/disk/deep/exported.*No space left.*storage", error), error
    assert found["export: cut shard"][2].startswith("DamagedCheckpointError: ")
    assert "exporting to " in found["export: below a file"][2]
    assert "number of parameters" not in found["export: below a file"][1], "before the model is built"
    for what, (code, _, error) in found.items():
        assert code in (1, 2), (what, error)
        assert len(error.splitlines()) == 1, (what, error)
        assert re.match(r"\w+Error: ", error), (what, error)


def of_exports(folder: str) -> dict[str, Any]:
    """Exports of a model that was trained without the head that its Hugging Face model has."""
    root, whole, bare = Path(folder), f"{folder}/whole", f"{folder}/bare"
    if not runs.write_model("Qwen3.5", whole):
        return {}
    changed(whole, root / "bare", lambda tensors: [tensors.pop(name) for name in list(tensors) if "mtp." in name])
    config = json.loads((root / "bare" / "config.json").read_text())
    (root / "bare" / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    found: dict[str, Any] = {}
    found |= {"import": said("import", "--hf-model", bare, "--megatron-path", f"{folder}/checkpoint")}
    line = ("export", "--hf-model", whole, "--megatron-path", f"{folder}/checkpoint", "--hf-path", f"{folder}/exported")
    found["strict"] = said(*line)
    found["left"] = sorted(path.name for path in root.iterdir())
    found["not strict"] = said(*line, "--not-strict")
    if found["not strict"][0]:
        return found
    found["differences"] = runs.differences(bare, f"{folder}/exported", exact=True)
    more = changed(whole, root / "more", lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    again = ("export", "--hf-model", more, "--megatron-path", f"{folder}/checkpoint", "--hf-path", f"{folder}/again")
    found["Bridge fails"] = said(*again)
    found["again"] = said(*again, "--not-strict")
    runs.write_model("Qwen3", f"{folder}/other")
    other = ("--megatron-path", f"{folder}/checkpoint", "--hf-path", f"{folder}/others", "--not-strict")
    found["another model"] = said("export", "--hf-model", f"{folder}/other", *other)
    found["left in the end"] = sorted(path.name for path in root.iterdir())
    return found


def test_an_export_may_leave_out_what_the_checkpoint_lacks(bridge_ranks: RankPool, tmp_path: Path) -> None:
    [found] = bridge_ranks.run(of_exports, str(tmp_path), ranks=1)
    if not found:
        pytest.skip(not_in_bridge("Qwen3.5"))
    assert found["import"][0] == 0, found["import"]
    code, _, error = found["strict"]
    assert (code, len(error.splitlines())) == (1, 1), error
    assert error.startswith("KeyMismatchError: ")
    assert "--not-strict lets tensors be absent" in error
    assert "allow_missing" not in error
    assert "load_optim" not in error
    assert found["left"] == ["bare", "checkpoint", "whole"]
    code, out, error = found["not strict"]
    assert code == 0, error
    assert "left out, absent in the checkpoint: mtp." in out
    assert found["differences"] == []
    assert found["Bridge fails"][0] == 1
    assert len(found["Bridge fails"][2].splitlines()) == 1
    assert found["again"][0] == 0, found["again"]
    assert found["another model"][0] == 1
    assert len(found["another model"][2].splitlines()) == 1
    assert found["left in the end"] == ["again", "bare", "checkpoint", "exported", "more", "other", "whole"]

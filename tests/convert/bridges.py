# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Each model that the installed Megatron-Bridge has a bridge for: Hugging Face -> checkpoint -> Hugging Face.

tiny random model --import--> checkpoint --export--> the same tensors?      TP 2, EP 2 where there are experts
        |                                               | no
        +-------> Bridge's model --Bridge's export--> the same tensors?     without this package

How each ended is kept in docs/bridges.json, with the versions that it holds for, and stands in a table of
docs/compatibility.md; `python -m tests.convert.bridges` makes both anew.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import mbridge_fsdp_ckpt
from testing.modules import BRIDGE_MODULES, installed
from testing.ranks import RankFailed, RankPool
from tests.convert import hugging_face_runs as runs
from tests.families.reference import Layout
from tests.models import hugging_face, imported

RECORD = Path(__file__).parents[2] / "docs" / "bridges.json"
RANKS = 2


@dataclass(frozen=True)
class Ending:
    """How one model ended.

    Args:
        kind: "identical", "unknown" (transformers does not have the model), "Bridge" (it fails, or differs, without
            this package, too) or "here" (it does so through this package alone).
        why: What failed or differs.
    """

    kind: str
    why: tuple[str, ...] = ()


def there_and_back(name: str, folder: Path, ranks: RankPool) -> Ending:
    """Convert one model."""
    can_be_made, experts = ranks.run(written, name, str(folder), ranks=1)[0]
    if not can_be_made:
        return Ending("unknown")
    here = _why(ranks, through_a_checkpoint, folder, experts)
    if not here:
        return Ending("identical")
    alone = _why(ranks, through_bridge, folder, experts)
    return Ending("Bridge" if alone else "here", alone or here)


def _why(ranks: RankPool, convert: Callable[[str, bool], str], folder: Path, experts: bool) -> tuple[str, ...]:
    """What fails, or differs; nothing where neither is so.  Bridge alone leaves some tensors in float32."""
    try:
        exported, _ = ranks.run(convert, str(folder), experts, ranks=RANKS)
    except RankFailed as failure:
        return (_error(failure),)
    found = runs.differences(str(folder / "original"), exported, exact=convert is through_a_checkpoint)
    return tuple(dict.fromkeys(re.sub(r"\b\d+\b", "*", line) for line in found))


def _error(failure: RankFailed) -> str:
    """The first exception that the first rank to fail shows: the cause of the others."""
    traceback = next(iter(failure.tracebacks.values()))
    found = re.search(r"^([\w.]*(?:Error|Exception)\b.*)", traceback, re.MULTILINE)
    assert found, traceback
    return re.sub(r"(/[\w.-]+){2,}", "...", found[1])[:200]


def known() -> dict[str, bool]:
    """On one rank: the architectures in the registry of the installed Bridge, and whether a model can be made."""
    from megatron.bridge import AutoBridge

    return {name: hugging_face.named(name) is not None for name in AutoBridge.list_supported_models()}


def written(name: str, folder: str) -> tuple[bool, bool]:
    """On one rank: write a model; whether transformers knows it, and whether it has experts."""
    model = hugging_face.named(name)
    if model is None:
        return False, False
    runs.write_model(name, f"{folder}/original")
    _empty(f"{folder}/original", f"{folder}/emptied")
    return True, model.has_experts


def _empty(source: str, folder: str) -> None:
    """A copy whose tensors are zeros: what an export takes from its original instead of the model then shows."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    path = Path(folder) / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def through_a_checkpoint(folder: str, experts: bool) -> str:
    """On every rank: import and export, as on a machine without CUDA; where the model lies."""
    from mbridge_fsdp_ckpt.tools.convert.hugging_face import Files, Sizes, Source, export_model, import_model

    sizes = Sizes(tensor=RANKS, expert=RANKS if experts else 1)
    checkpoint, exported = Path(folder, "checkpoint"), f"{folder}/exported"
    with runs.begun_anew(), runs.without_cuda():
        import_model(Source(f"{folder}/original"), sizes, checkpoint)
    with runs.begun_anew(), runs.without_cuda():
        files = Files(show_progress=False)
        export_model(Source(f"{folder}/emptied"), sizes, checkpoint / "iter_0000000", exported, files)
    return exported


def through_bridge(folder: str, experts: bool) -> str:
    """On every rank: the same by Bridge alone, without a checkpoint between; where the model lies."""
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file

    mbridge_fsdp_ckpt.unregister()
    layout, alone = Layout(RANKS, tensor=RANKS, expert=RANKS if experts else 1), Path(folder, "alone")
    with runs.begun_anew():
        model = imported.build(f"{folder}/original", layout, load=True, wrap=False)
        bridge: Any = AutoBridge.from_hf_pretrained(f"{folder}/emptied", torch_dtype=torch.bfloat16)
        tensors = {name: tensor.contiguous() for name, tensor in bridge.export_hf_weights([model], cpu=True)}
    if dist.get_rank() == 0:
        alone.mkdir()
        save_file(tensors, alone / "model.safetensors", {"format": "pt"})
    dist.barrier()
    return str(alone)


def recorded() -> tuple[dict[str, str], dict[str, Ending]]:
    """The versions that the last record holds for, and how each architecture ended with them."""
    record = json.loads(RECORD.read_text())
    endings = {name: Ending(ending["kind"], tuple(ending["why"])) for name, ending in record["models"].items()}
    return record["versions"], endings


def installed_versions() -> dict[str, str]:
    """Of the packages that decide how a model ends."""
    return {package: version(package) for package in ("megatron-bridge", "megatron-core", "transformers")}


def _record() -> None:
    """Convert every model; write docs/bridges.json."""
    from tests import compatibility

    endings = {}
    with RankPool(RANKS, preload=installed(BRIDGE_MODULES)) as ranks:
        for name in ranks.run(known, ranks=1)[0]:
            with TemporaryDirectory() as folder:
                endings[name] = asdict(there_and_back(name, Path(folder), ranks))
            print(name, endings[name]["kind"], *endings[name]["why"], sep="  ")
    RECORD.write_text(json.dumps({"versions": installed_versions(), "models": endings}, indent=1) + "\n")
    compatibility.PAGE.write_text(compatibility.rewritten(compatibility.PAGE.read_text()))


if __name__ == "__main__":
    _record()

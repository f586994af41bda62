# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Hugging Face -> checkpoint -> Hugging Face: an unmodified script, and the command; TP 2, EP 2, 4 ranks.

script import --------> checkpoint --> command export       the script runs under Megatron-FSDP, as on CUDA;
command import -------> checkpoint --> script export        the command as on a machine without a GPU;
                                                            once as loaded, once with sharded parameters in place
script import --------> checkpoint --> script export from a model that nothing wraps
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.convert import hugging_face_runs as runs
from tests.models import hugging_face
from tests.models.test_real_models import not_in_bridge
from tests.soak import sampling
from tests.upstream import is_before

pytestmark = pytest.mark.bridge

EXPORTING = list(itertools.product(("fsdp_dtensor_safe", "torch_dist"), (1, 2, 4)))
# Bridge 0.5 takes a sharded parameter's global shape for that of one tensor-parallel rank, under whatever format.
TP = "1" if is_before("megatron-bridge", "0.6") else "2"
WAYS = ("script_command", "command_script", "command_script_sharded", "script_unwrapped")


@pytest.mark.parametrize("name", sampling.drawn("models there and back", list(hugging_face.MODELS), share=4))
def test_there_and_back(name: str, bridge_ranks: RankPool, tmp_path: Path) -> None:
    source = str(tmp_path / "original")
    if not bridge_ranks.run(runs.write_model, name, source, ranks=1)[0]:
        pytest.skip(not_in_bridge(name))
    experts = ["--ep", "2"] if hugging_face.MODELS[name].has_experts else []
    bridge_ranks.run(runs.convert_every_way, source, str(tmp_path), ["--tp", TP, *experts], ranks=4)
    exported = [str(tmp_path / way) for way in WAYS]
    assert runs.differences(source, exported[0], exact=True) == []
    assert [runs.differences(source, folder, exact=False) for folder in exported] == [[]] * len(WAYS)
    assert bridge_ranks.run(runs.same_logits, name, source, exported, ranks=1) == [[True] * len(WAYS)]
    tokenizers = (tmp_path / "by_command" / "iter_0000000" / "tokenizer", tmp_path / WAYS[0], Path(source))
    assert len({str(runs.tokens_of(folder)) for folder in tokenizers}) == 1


@pytest.fixture(scope="module")
def imported(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and the checkpoint that the command made of it."""
    root = tmp_path_factory.mktemp("imported")
    source, checkpoint = str(root / "original"), str(root / "checkpoint")
    assert bridge_ranks.run(runs.write_model, "Qwen3", source, ranks=1) == [True]
    bridge_ranks.run(runs.command, "import", source, checkpoint, ranks=1)
    return source, checkpoint


@pytest.mark.parametrize(("named", "ranks"), sampling.drawn("jobs that export", EXPORTING, share=3))
def test_the_script_exports_from_a_job_of_its_own(
    named: str, ranks: int, imported: tuple[str, str], bridge_ranks: RankPool, tmp_path: Path
) -> None:
    """Both branches of the script's: nobody has made a process group before it."""
    sizes = ["--tp", str(min(ranks, 2))]
    bridge_ranks.run(
        runs.exported_by_a_job_of_its_own, *imported, str(tmp_path / "exported"), named, sizes, ranks=ranks
    )
    assert runs.differences(imported[0], str(tmp_path / "exported"), exact=False) == []

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The tiny variant of every recipe trains, saves, is killed, resumes in new processes, and repeats the whole run.

`make test` draws one, `make test-all` runs all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.catalog import RECIPES
from testing.ranks import Died, RankPool
from tests.core import oracle
from tests.recipes.data import write_data, write_tokenizer
from tests.recipes.runs import Death, Run, train
from tests.run_directories import as_it_was
from tests.soak import sampling

pytestmark = pytest.mark.bridge

RANKS = 4
TINY = [name for name, recipe in RECIPES.items() if recipe.tiny]
TRAINED = sampling.drawn("tiny recipes", TINY, share=len(TINY))
FINETUNING = "qwen35_35b_a3b_sft"
PRETRAINED = "qwen35_35b_a3b_pretrain_tiny"
ALONE = sampling.drawn("tiny recipe on one rank", TRAINED, share=len(TRAINED))
"""Those whose run is also taken over by a single rank, at the end."""

ONE_RANK = (
    "model.tensor_model_parallel_size=1",
    "model.sequence_parallel=false",
    "model.context_parallel_size=1",
    "model.expert_model_parallel_size=1",
)
STANDSTILL = ("optimizer.lr=0.0", "optimizer.min_lr=0.0")
DEATHS = (
    ("megatron.bridge.training.train:training_log", range(RANKS)),
    ("mbridge_fsdp_ckpt.saving.writer:write", range(RANKS)),
    ("mbridge_fsdp_ckpt.saving.writer:CommitRound.decide", range(1)),
    ("mbridge_fsdp_ckpt.commit.rename:put_in_place", range(1)),
)


@pytest.fixture(scope="module")
def for_finetuning(bridge_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What a fine-tuning recipe asks its user for: data, a tokenizer, a checkpoint of the same model."""
    directory = tmp_path_factory.mktemp("finetuning")
    write_data(directory / "data")
    write_tokenizer(directory / "tokenizer")
    bridge_ranks.run(train, Run(PRETRAINED, str(directory / "pretrained"), iterations=1), ranks=RANKS)
    return (
        f"checkpoint.pretrained_checkpoint={directory / 'pretrained'}",
        f"dataset.dataset_root={directory / 'data'}",
        f"tokenizer.tokenizer_model={directory / 'tokenizer'}",
    )


@pytest.mark.parametrize("name", TRAINED)
def test_a_killed_run_resumes_as_if_nothing_had_happened(
    name: str, bridge_ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments = request.getfixturevalue("for_finetuning") if RECIPES[name].finetunes else ()
    run = Run(name, str(tmp_path / "whole"), arguments=arguments)
    whole = bridge_ranks.run(train, run, ranks=RANKS)
    assert list(whole[0]) == [1, 2, 3]
    assert len(set(whole[0].values())) == 3, "the weights do not move"
    again, death = run.on(directory=str(tmp_path / "again")), drawn_death(name)
    died = kill(bridge_ranks, again.on(death=death))
    context = f"{death}; {sampling.how_to_repeat()}"
    assert isinstance(died[death.rank], Died), context
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "1", context
    resumed = bridge_ranks.run(train, again, ranks=RANKS)
    for through, later in zip(whole, resumed, strict=True):
        assert later == {step: through[step] for step in (2, 3)}, context
    for iteration in (1, 2, 3):
        of = f"iter_{iteration:07}"
        assert oracle.on_disk(tmp_path / "again" / of) == oracle.on_disk(tmp_path / "whole" / of), context
    if name in ALONE:
        place = as_it_was(tmp_path / "whole", tmp_path / "alone")
        [alone] = bridge_ranks.run(train, run.on(directory=place, arguments=(*arguments, *ONE_RANK)), ranks=1)
        assert alone == {3: pytest.approx(whole[0][3], rel=1e-3)}, "the layouts compute different things"


def test_fine_tuning_starts_from_the_pretrained_weights(
    bridge_ranks: RankPool, for_finetuning: tuple[str, ...], tmp_path: Path
) -> None:
    run = Run(f"{FINETUNING}_tiny", str(tmp_path), iterations=1, arguments=(*for_finetuning, *STANDSTILL))
    bridge_ranks.run(train, run, ranks=RANKS)
    pretrained = Path(for_finetuning[0].partition("=")[2])
    found, expected = (
        {key: value for key, value in oracle.on_disk(root / "iter_0000001").items() if key.startswith("model.")}
        for root in (tmp_path, pretrained)
    )
    assert found == expected


def drawn_death(name: str) -> Death:
    """In the second iteration or its save."""
    draw = sampling.rng(f"death of {name}")
    call, ranks = draw.choice(DEATHS)
    return Death(call, 2, draw.choice(ranks))


def kill(pool: RankPool, run: Run) -> list[object]:
    """Run until a rank is killed, then, as a launcher does, kill the others."""
    pool.start(RANKS)
    over = threading.Event()
    watch = threading.Thread(target=_end_with_the_first, args=(pool.processes, over))
    watch.start()
    try:
        return list(pool.run(train, run, ranks=RANKS, may_die=range(RANKS)))
    finally:
        over.set()
        watch.join()


def _end_with_the_first(processes: dict[int, int], over: threading.Event) -> None:
    handles = dict(_opened(processes))
    try:
        while not over.wait(0.05) and all(map(_lives, processes.values())):
            pass
        if not over.is_set():
            for handle in handles.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        for handle in handles.values():
            os.close(handle)


def _opened(processes: dict[int, int]) -> Iterator[tuple[int, int]]:
    for rank, process in processes.items():
        yield rank, os.pidfd_open(process)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""What follows a commit under Bridge: trackers on all ranks' account, old checkpoints on nobody's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.storage.commit import removal
from mbridge_fsdp_ckpt.testing.ranks import RankFailed, RankPool, no_process_group
from tests.bridge.training import Run, train
from tests.patched import patched

pytestmark = pytest.mark.bridge

STATE = "latest_train_state.pt"


@no_process_group
def train_where(run: Run, call: str) -> list[int]:
    """Train while a call fails on rank 0; the iterations trained."""

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            if os.environ["RANK"] == "0":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return fail

    with patched(f"mbridge_fsdp_ckpt.{call}", failing):
        losses = train(run)["losses"]
        assert removal.wait(30.0)
    return sorted(losses)


def test_a_tracker_that_cannot_be_written_is_the_same_error_on_all_ranks(
    bridge_ranks: RankPool, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), iterations=4)
    with pytest.raises(RankFailed) as caught:
        bridge_ranks.run(train_where, run, "bridge.after_save:replace_file", ranks=2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "StorageError: [rank 0 on " in text
        assert "No space left on device. The checkpoint is complete and in its place" in text
    assert (tmp_path / "iter_0000002" / "manifest.json").is_file()
    assert not (tmp_path / STATE).exists()


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(bridge_ranks: RankPool, tmp_path: Path) -> None:
    run = Run(str(tmp_path), iterations=3, save_every=1, config={"checkpoint.most_recent_k": 1})
    trained = bridge_ranks.run(train_where, run, "storage.commit.methods:remove", ranks=2)
    assert trained == [[1, 2, 3]] * 2
    assert len(list(tmp_path.glob("iter_*"))) == 3
    bridge_ranks.run(train, run.on(iterations=4), ranks=2)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000004"]

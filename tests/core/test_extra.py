# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What modules of one's own keep beside tensors, and buffers named like it: saved and given back, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.ranks import RankPool
from tests.core import extra
from tests.core.test_failures import same_on_all


@pytest.mark.parametrize(("beside", "experts"), [(False, 2), (True, 1)])
def test_what_modules_keep_comes_back(beside: bool, experts: int, megatron_ranks: RankPool, tmp_path: Path) -> None:
    target = str(tmp_path / "c")
    megatron_ranks.run(extra.save, target, beside, ranks=2)
    kept = {"decoder": extra.kept_from(extra.SAVED), "tensor": extra.tensor_from(extra.SAVED)}
    if beside:
        kept["nothing 0"] = {"came": "later"}
    for rank, found in enumerate(megatron_ranks.run(extra.load, target, experts, ranks=2)):
        here = range(4) if experts == 1 else range(2 * rank, 2 * rank + 2)
        expected = kept | {f"expert {number}": {"expert": number, "of": extra.SAVED} for number in here}
        assert {name: found[name] for name in expected} == {
            name: extra.plain((value, 1)) for name, value in expected.items()
        }
        assert all(found[f"nothing {place}"][1] == ("int", 0) for place in (1, 2))
        assert {name: found[f"buffer {name}"] for name in extra.BUFFERS} == extra.BUFFERS


def test_what_cannot_be_saved_is_refused_by_name(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(extra.save_refused, str(tmp_path / "c"), ranks=2)
    for name, (_, says) in extra.REFUSED.items():
        text = same_on_all([result[name] for result in results], "UnsupportedStateError")
        assert "decoder.mine." in text
        assert says in text
    assert not (tmp_path / "c").exists()


def test_where_only_one_side_keeps_something(megatron_ranks: RankPool, tmp_path: Path) -> None:
    results = megatron_ranks.run(extra.load_otherwise, str(tmp_path / "c"), ranks=2)
    for name in ("missing", "unexpected"):
        text = same_on_all([result[name] for result in results], "KeyMismatchError")
        assert f"1 {name}: model.module.decoder.mine._extra_state" in text
    for result in results:
        assert result["allowed"] == {"kept": {"live": 2}, "sets": 0, "skipped": result["allowed"]["skipped"]}
        assert "model.module.decoder.mine._extra_state" in result["allowed"]["skipped"]
        assert result["again"] == {"kept": {"a": 1}, "sets": 1}

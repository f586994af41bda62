# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a load checks before anything changes: the caller's own state, and as much of the bytes as was asked for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from testing.ranks import RankPool
from tests.core import accepting, cases
from tests.unit import handmade, index_bytes


@pytest.fixture
def saved(megatron_ranks: RankPool, tmp_path: Path) -> tuple[Path, Any]:
    directory = tmp_path / "iter_0000002"
    return directory, megatron_ranks.run(cases.train_and_save, str(directory), accepting.RECIPE, ranks=2)[0]["live"]


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_rank_does_not_accept_fails_all_and_changes_nothing(
    refusing: int, saved: tuple[Path, Any], megatron_ranks: RankPool
) -> None:
    results = megatron_ranks.run(accepting.load_unacceptable, str(saved[0]), refusing, ranks=2)
    assert {result["error"] for result in results} == {"RankFailedError"}
    assert len({result["text"] for result in results}) == 1
    assert "no schedule of iteration 2" in results[0]["text"]
    assert f"rank {refusing} on " in results[0]["text"]
    assert all(result["unchanged"] and result["placed"] == [] for result in results)


def test_the_callers_state_is_checked_before_and_put_in_place_after(
    saved: tuple[Path, Any], megatron_ranks: RankPool
) -> None:
    for result in megatron_ranks.run(accepting.load_accepted, str(saved[0]), ranks=2):
        assert result["order"] == [("accept", 2, True), ("in place", False)]
        assert _weights(result["live"]) == _weights(saved[1])


def _weights(live: Any) -> Any:
    return {key: value for key, value in live.items() if key.startswith("model.")}


def test_a_checkpoint_that_is_overwritten_after_its_check_is_loaded_as_it_was(
    saved: tuple[Path, Any], megatron_ranks: RankPool
) -> None:
    for result in megatron_ranks.run(accepting.load_overwritten, str(saved[0]), ranks=2):
        assert result["live"] != result["later"]
        assert (result["iteration"], result["live"]) == (2, saved[1])


def test_a_load_reads_again_what_it_could_not_keep(saved: tuple[Path, Any], megatron_ranks: RankPool) -> None:
    """Optimizer state is read once; of the weights all twice, none, or all but 20,000 bytes."""
    modes: dict[str, tuple[Any, int | None]] = {
        "header": ("header", None),
        "by default": ("full", None),
        "nothing kept": ("full", 0),
        "some kept": ("full", 20_000),
    }
    read = {}
    for name, (verify, buffer) in modes.items():
        results = megatron_ranks.run(accepting.load_verifying, str(saved[0]), verify, buffer, ranks=2)
        assert [result["error"] for result in results] == ["", ""]
        assert all(result["live"] == saved[1] for result in results)
        read[name] = [result["read"] for result in results]
    for rank, (header, kept, twice, some) in enumerate(zip(*read.values(), strict=True)):
        weights = _bytes_of_weights(saved[0] / f"rank_{rank:05}.index")
        assert header == kept
        assert twice == header + weights
        assert twice - 20_000 <= some < twice - 10_000


def _bytes_of_weights(path: Path) -> int:
    """Of a rank's records."""
    file = index_bytes.decode(path.read_bytes())
    ends = [0, *(key["text"] for key in file["keys"])]
    keys = zip(file["keys"], pairwise(ends), strict=True)
    weights = [key for key, (first, last) in keys if file["texts"][first:last].startswith(b"model.")]
    spans = [file["rows"][key["first"] : key["first"] + key["count"]] for key in weights]
    return sum(row["length"] for rows in spans for row in rows)


@pytest.mark.parametrize("verify", ["full", "header"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "index flipped", "manifest flipped"])
def test_how_much_is_seen(damage: str, verify: str, saved: tuple[Path, Any], megatron_ranks: RankPool) -> None:
    directory, live = saved
    what = {"index": "rank_00001.index", "manifest": "manifest.json"}.get(damage.split()[0], "__1_0.distcp")
    path = directory / what
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[content.find(b"/data/0") + 200 if what.endswith("distcp") else len(content) // 2] ^= 1
        path.write_bytes(content)
    results = megatron_ranks.run(accepting.load_verifying, str(directory), verify, ranks=2)
    if (damage, verify) == ("flipped", "header"):
        assert [result["error"] for result in results] == ["", ""], "contents go unseen, as documented"
        assert results[0]["live"] != live
    else:
        assert all(what in result["error"] and result["unchanged"] for result in results)


def test_ranks_that_find_other_slots_of_a_parameter_fail_and_change_nothing(
    saved: tuple[Path, Any], megatron_ranks: RankPool
) -> None:
    """First ranks that differ while the index does not; then one rank's own index lacks a slot of all its parameters.

    In neither case a rank can know alone.
    """
    results = megatron_ranks.run(accepting.load_with_another_filter, str(saved[0]), ranks=2)
    assert [result["error"] for result in results] == ["PlanDisagreementError"] * 2
    assert all(result["unchanged"] for result in results)
    path = saved[0] / "rank_00001.index"
    part = index_bytes.decode(path.read_bytes())
    slots = [text.decode() for text in handmade.texts_of(part) if text.endswith(b".exp_avg_sq")]
    for key in slots:
        handmade.take_out(part, key)
    path.write_bytes(index_bytes.encode(part))
    results = megatron_ranks.run(accepting.load_verifying, str(saved[0]), "full", ranks=2)
    assert len({result["error"] for result in results}) == 1
    assert "in the index file of this rank, as in the others" in results[0]["error"]
    assert all(result["unchanged"] for result in results)

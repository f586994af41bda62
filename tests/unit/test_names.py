# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Names of files: what one function builds, the others read."""

import pytest

from mbridge_fsdp_ckpt.format import names

SUFFIX = "-0123456789ab"


@pytest.mark.parametrize("suffix", ["", SUFFIX])
@pytest.mark.parametrize("rank", [0, 7, 16_383, 123_456])
def test_a_name_of_payload_or_of_an_index_is_read_back(rank: int, suffix: str) -> None:
    files = names.Files("0123456789ab", suffix)
    payload, index, group = files.payload(rank), files.of_rank(rank), files.of_group(rank)
    assert (payload, index) == (f"__{rank}_0{suffix}.distcp", f"rank_{rank:05d}{suffix}.index")
    assert group == f"group_{rank:05d}{suffix}.index"
    assert all(map(files.are_of_ranks, (payload, index, group)))
    assert names.rank_of_payload(payload) == names.rank_of_payload(names.payload_name(rank, suffix, 1)) == rank
    assert names.rank_of_payload(index, unknown=-1) == names.rank_of_payload(group, unknown=-1) == -1
    assert [names.suffix_of(name) for name in (payload, index, group)] == [suffix] * 3
    assert all(map(names.is_part, (payload, index, group, names.MANIFEST_NAME, names.DCP_METADATA)))


@pytest.mark.parametrize(
    "name",
    [
        "run_config.yaml",
        "manifest.json2",
        "tokenizer/__0_0.distcp",
        "rank_a.index",
        "group_.index",
        "ranks_00000.index",
        "rank_00000.index/x",
        "metadata",
    ],
)
def test_other_files_are_no_part(name: str) -> None:
    assert not names.is_part(name)


@pytest.mark.parametrize(
    "name",
    [
        "__0_0.distcp",
        f"__0_1{SUFFIX}.distcp",
        "__0_0-ffffffffffff.distcp",
        "rank_00000.index",
        f"rank_00000{SUFFIX}.index2",
        f"x/rank_00000{SUFFIX}.index",
        f"rank_{SUFFIX}.index",
        "manifest.json",
    ],
)
def test_what_ranks_of_the_save_did_not_write_is_not_theirs(name: str) -> None:
    assert not names.Files("0123456789ab", SUFFIX).are_of_ranks(name)


@pytest.mark.parametrize(
    "name", ["__0_0-0123.distcp", "__0_0-0123456789A.distcp", f"x{SUFFIX}.index", f"__0_0{SUFFIX}"]
)
def test_a_suffix_that_no_save_made_is_none(name: str) -> None:
    assert not names.suffix_of(name)


@pytest.mark.parametrize(("number", "name"), [(0, "iter_0000000"), (10, "iter_0000010"), (12_345_678, "iter_12345678")])
def test_an_iteration_is_read_back(number: int, name: str) -> None:
    assert names.iteration_name(number) == name
    assert names.iteration_of(name) == number


@pytest.mark.parametrize("name", ["iter_", "iter_1x", ".staging-iter_0000010-0123456789ab", "release", "iter_-1"])
def test_other_directories_are_no_iteration(name: str) -> None:
    assert names.iteration_of(name) is None


@pytest.mark.parametrize("target", ["iter_0000010", "model-ema", "a\nb", "-", "run[1]"])
@pytest.mark.parametrize("mark", [names.STAGING, names.REPLACED, names.DELETED])
def test_what_stands_beside_a_checkpoint_tells_which(mark: str, target: str) -> None:
    one, other = names.beside(mark, target), names.beside(mark, target)
    assert one != other
    assert names.target_of(one) == names.target_of(other) == target
    assert names.target_of(names.beside(names.READING, target)) == names.target_of(target) == ""
    assert not any(names.target_of(f"{one[:-12]}{token}") for token in ("", "0", "0123456789xy", "0123456789abc"))
    assert names.read_of(names.beside(names.READING, target)) == target
    assert not any(names.read_of(name) for name in (one, target, f"{names.READING}list", names.READING))

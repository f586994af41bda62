# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Tables of options: whose they are, what is refused and what is said.

Fields of Bridge and VeRL are read from their files: a stack that cannot install them has these, too.  That reading them
finds what the classes have is in tests/bridge and tests/verl, whose ranks have imported them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.integrations.common import options
from mbridge_fsdp_ckpt.integrations.common.options import Handling, Option, check, given_by, warn_once
from mbridge_fsdp_ckpt.integrations.megatron_lm.choice import check_arguments
from mbridge_fsdp_ckpt.versions import TESTED
from tests.options import DECLARED, ENUMERATED, PAGE, SOURCES, TABLES, declared, differing, is_there, page

STACKS = Path(__file__).parents[2] / "requirements" / "stacks"


def test_the_table_has_the_options_of_the_installed_release() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.options", "--megatron-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    has: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert len(has) > 50
    assert differing("Megatron-LM", has) == []
    assert differing("Megatron-LM", [*has, "new"], Option("gone", Handling.OBEYED, "It is.")) == ["gone", "new"]
    flags = {option.name: option.written for option in ENUMERATED["Megatron-LM"]}
    assert [name for name, written in has.items() if flags[name] not in written] == []


@pytest.mark.parametrize("host", DECLARED)
def test_the_table_has_the_fields_that_a_host_declares(host: str) -> None:
    """On every stack for which there is such a host: what upstream adds there fails."""
    if not is_there(host):
        stack = os.environ.get("STACK", "")  # make says it
        assert not (stack and (STACKS / stack / "full.txt").exists()), f"no files of {host} in {SOURCES}: make test"
        pytest.skip(f"this stack has no {host}")
    has = declared(host)
    assert len(has) > 5
    assert differing(host, has) == []
    assert differing(host, [*has, "new"], Option("gone", Handling.OBEYED, "It is.")) == ["gone", "new"]


def test_no_row_is_of_a_release_before_the_window_or_said_twice() -> None:
    for table in TABLES.values():
        assert len({option.name for option in table}) == len(table)
        for option in table:
            for release in filter(None, (option.since, option.until)):
                package, _, number = release.partition(" ")
                first = TESTED[package].partition(",")[0].removeprefix(">=")
                assert tuple(map(int, number.split("."))) > tuple(map(int, first.split("."))), option.name
            assert option.text.endswith(".")
            assert bool(option.remedy) == (
                option.handling is Handling.REFUSED or bool(option.handling is Handling.OBEYED and option.when)
            )


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.options"


def test_megatron_lm_is_refused_the_second_version_by_name() -> None:
    args = Namespace(megatron_fsdp_version=2, data_parallel_sharding_strategy_experts="no_shard")
    with pytest.raises(ConfigurationError, match="--megatron-fsdp-version 2"):
        check_arguments(args)
    args.megatron_fsdp_version = 1
    assert check_arguments(args) == []


@dataclass
class Host:
    """Options of a host."""

    kept: int = 1
    barred: str | None = None
    idle: list[int] = field(default_factory=list)
    halved: bool = False
    added: bool = False
    _private: int = 0


TABLE = (
    Option("kept", Handling.OBEYED, "It is.", when=lambda host: host.kept < 0, remedy="Raise it."),
    Option("barred", Handling.REFUSED, "It cannot be.", remedy="Leave it."),
    Option("idle", Handling.NO_EFFECT, "Nobody reads it.", shown="--idle"),
    Option("halved", Handling.IN_PART, "Half of it works."),
    Option("absent", Handling.REFUSED, "Not here.", remedy="None."),
)


def checked(host: Host) -> list[str]:
    return check(host, given_by(host), TABLE, lambda name, value: f"{name}={value}")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (Host(), []),
        (Host(kept=7, _private=3), []),
        (Host(idle=[1]), ["--idle=[1] has no effect with fsdp_dtensor_safe: Nobody reads it."]),
        (Host(halved=True), ["halved=True with fsdp_dtensor_safe: Half of it works."]),
        (
            Host(added=True),
            ["added=True: this release of mbridge_fsdp_ckpt does not know that option, and may not obey it"],
        ),
    ],
)
def test_what_has_no_effect_is_said_where_it_is_set(host: Host, said: list[str]) -> None:
    assert checked(host) == said


def test_all_that_is_refused_is_in_one_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        checked(Host(kept=-1, barred="x", idle=[1]))
    assert caught.value.found == "kept=-1, barred=x"
    assert caught.value.remedy == "It is. Raise it. It cannot be. Leave it."


@pytest.mark.parametrize(("rank", "said"), [("0", "WARNING: a\nWARNING: b\n"), ("1", "")])
def test_rank_0_says_each_once(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(options, "_warned", set())
    warn_once(["a", "b"])
    warn_once(["b", "a"])
    assert capsys.readouterr().out == said

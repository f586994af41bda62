# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A checkpoint made to harm: no code runs, no file outside is opened, memory and time are bounded, errors named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mbridge_fsdp_ckpt.format.schema import IndexHeader, Manifest
from tests.soak import attacks_types, sampling
from tests.soak.attacks import ATTACKS
from tests.soak.attacks_stock import CALLS, OPCODES
from tests.soak.hostile import CANARY, Seen, forked, watch

pytestmark = pytest.mark.timeout(3000)
PROCESSES = 2
ADDITIONS = 160_000_000
"""An attack may take the processor time of so many additions in Python, 5 to 8 seconds; the longest one took that of 70
to 115 million.

In seconds alone it would be a bound for the machine: signed index files of 50,000 entries are read in 4 of them on one
and in 5.5 on another."""
PART = 20
"""One in so many of them is measured."""
LATE = "missed: time"

UNTOUCHED = [name for name, attack in ATTACKS.items() if attack.kind == "untouched"]
UNREAD = "JSON: a gigabyte manifest"


def allowed() -> float:
    """Processor time that one attack may take on this machine now, in seconds."""
    begin, total = time.process_time(), 0
    for number in range(ADDITIONS // PART):
        total += number
    return (time.process_time() - begin) * PART


def attempted(names: list[str], folder: Path) -> dict[str, Seen]:
    """What the attacks achieved."""
    command = [sys.executable, "-m", "tests.soak.hostile"]
    runs = []
    for number in range(PROCESSES):
        own = folder / str(number)
        own.mkdir(parents=True)
        (own / "names").write_text(json.dumps(names[number::PROCESSES]))
        with (own / "names").open() as wanted, (own / "seen").open("w") as seen, (own / "log").open("w") as log:
            runs.append((own, subprocess.Popen([*command, str(own)], stdin=wanted, stdout=seen, stderr=log)))
    found: dict[str, Seen] = {}
    for own, process in runs:
        assert process.wait() == 0, (own / "log").read_text()[-2000:]
        for line in (own / "seen").read_text().splitlines():
            said = json.loads(line)
            found[said["name"]] = Seen(**{**said, "outside": tuple(said["outside"])})
    return found


def decision(seen: Seen, seconds: float) -> str:
    """The outcome; "missed: ..." where the attack achieved something, or took more than so much processor time."""
    said = seen.decision(ATTACKS[seen.name])
    return LATE if seen.seconds > seconds and not said.startswith("missed") else said


def test_no_attack_achieves_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = sampling.drawn("hostile", list(ATTACKS))
    names = list(dict.fromkeys([*UNTOUCHED, UNREAD, *drawn]))
    began = time.monotonic()
    limit = allowed()
    found = attempted(names, tmp_path)
    with capsys.disabled():
        print(f"\n{len(found)} attacks; {sampling.how_to_repeat()}")
    assert list(found.keys() ^ set(names)) == []
    late = [name for name, seen in found.items() if decision(seen, limit) == LATE]
    for number, name in enumerate(late):  # alone: processes beside each other take more processor time
        found |= attempted([name], tmp_path / f"again {number}")
        limit = max(limit, allowed())  # the machine may be slower than it was
    decisions = {name: decision(seen, limit) for name, seen in found.items()}
    sampling.record("hostile", _result(decisions, found.values(), limit, time.monotonic() - began))
    missed = {name: (said, found[name]) for name, said in decisions.items() if said.startswith("missed")}
    assert missed == {}, sampling.how_to_repeat()
    assert {name: decisions[name] for name in UNTOUCHED} == dict.fromkeys(UNTOUCHED, "accepted")
    unread = found[UNREAD]
    assert set(unread.outcomes.values()) == {"ManifestError", "found by verify"}
    assert (unread.memory < 1 << 25, unread.seconds < limit / 10) == (True, True), unread


def _result(decisions: dict[str, str], found: Iterable[Seen], limit: float, seconds: float) -> sampling.Result:
    ended = list(found)
    reasons = {ATTACKS[name].harmless for name, said in decisions.items() if said == "accepted"}
    facts: dict[str, str | int | float] = {
        "largest resident memory of one attack, MiB": max(seen.memory for seen in ended) >> 20,
        "most processor time of one attack, s": round(max(seen.seconds for seen in ended), 1),
        f"limit of processor time, that of {ADDITIONS // 10**6} million additions in Python, s": round(limit, 1),
        "accepted because": "; ".join(sorted(reasons)),
    }
    outcomes = sampling.tally((ATTACKS[name].kind, said) for name, said in decisions.items())
    return sampling.Result(seconds, outcomes, facts)


def test_every_field_is_attacked() -> None:
    """The walk over the models finds what docs/format.md lists."""
    manifest = {".".join(map(str, path)) for path in attacks_types.fields(Manifest)}
    assert {"format", "hyperparameters", "index.0.name", "index.0.rank", "files.0.checksum", "values"} <= manifest
    header = {".".join(map(str, path)) for path in attacks_types.fields(IndexHeader)}
    assert {"save", "axes", "entries.0.dtype", "entries.0.shape", "rows", "record_checksum"} <= header


@pytest.mark.parametrize("opcode", ["GLOBAL REDUCE", "STACK_GLOBAL REDUCE", "INST", "OBJ", "BUILD"])
@pytest.mark.parametrize("call", ["os.system", "posix.system", "builtins.exec", "builtins.eval"])
def test_code_runs_where_nothing_protects(opcode: str, call: str, tmp_path: Path) -> None:
    """What the attacks do to Python's own unpickler: without this, that no canary is found would prove nothing."""

    def unpickle() -> None:
        os.chdir(tmp_path)
        pickle.loads(OPCODES[opcode](*CALLS[call]))

    forked(unpickle)
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize(("flags", "seen"), [(os.O_RDONLY, True), (os.O_RDONLY | os.O_NOFOLLOW, False)])
def test_a_file_outside_is_seen_through_a_link(flags: int, seen: bool, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").touch()
    (inside / "link").symlink_to(tmp_path / "secret")

    def opens() -> list[str]:
        opened: list[str] = []
        watch(inside, opened)
        try:
            os.close(os.open(inside / "link", flags))
        except OSError:
            opened += ["refused"]
        return opened

    status, opened = forked(opens)
    assert status == 0
    expected: list[Any] = [str(tmp_path / "secret")] if seen else ["refused"]
    assert opened == expected

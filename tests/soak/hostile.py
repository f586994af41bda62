# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Runs attacks on the readers, each in a process of its own, and measures what they achieve.

    parent: imports once --fork--> builds the attack, ends
                         --fork--> limits itself; each reader: reports error, opened files, canary, seconds, memory

The readers are a load in the layout of the save, one in another layout, one of a rank that there was not, tools, which
open everything, and `verify`.

python -m tests.soak.hostile FOLDER < names of cases     one JSON line a case
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mbridge_fsdp_ckpt.errors import CheckpointError, KeyMismatchError
from mbridge_fsdp_ckpt.format.names import READING
from mbridge_fsdp_ckpt.format.source import sizes_of
from mbridge_fsdp_ckpt.integrations.common.root import find_checkpoint
from mbridge_fsdp_ckpt.io.progress import Unwatched
from mbridge_fsdp_ckpt.loading.match import check_coverage
from mbridge_fsdp_ckpt.opening import check_other_files, open_checkpoint
from mbridge_fsdp_ckpt.plan.boxes import Box, whole
from mbridge_fsdp_ckpt.tools.verify import verify
from tests.unit import handmade

ADDRESS_SPACE = 3 << 29  # 1.5 GiB more than the imports had mapped
MEMORY = 3 << 29  # resident, more than after the imports
CPU_SECONDS = 30  # for each reader, then the process is killed; what a reader may take is less, see test_hostile.py
WALL_SECONDS = 120  # for what waits without computing, on a busy machine
CANARY = "canary"
SIDE = "outside"
"""A file beside the checkpoint that must not be opened."""


VERIFIED = "what was saved, or nothing, is loaded; `verify` finds it"
FOUND = "who can sign can leave out what a load reads; `verify` finds it"
SIGNED = "who can sign can write another checkpoint, and this is one"
LONG = "no more than its file's size, and what was saved is loaded"
"""Why readers may accept an attack: the first two hold for loads alone, the first and the last for none but the tensors
saved."""

TARGETS = {"own": ("same", "verify"), "group": ("more", "tools", "verify")}
"""By what an attack's name begins with: the readers that must refuse it; the others do not read what was attacked."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A case.

    Args:
        kind: What the report counts it under.
        build: Given a good checkpoint's directory, makes it hostile.
        harmless: Why readers may accept it; empty where they must not.
        address_space: What the reader may map.
        refused_by: The readers that must refuse it.
    """

    kind: str
    build: Callable[[Path], None]
    harmless: str = ""
    address_space: int = ADDRESS_SPACE
    refused_by: tuple[str, ...] = ("same", "other", "more", "tools", "verify")

    @property
    def must_refuse(self) -> tuple[str, ...]:
        """The readers that must refuse it, whatever its reason.

        What contradicts another file of the checkpoint is always found by `verify`.
        """
        if not self.harmless:
            return self.refused_by
        if self.harmless == LONG:
            return ()
        return ("verify",) if self.harmless in (VERIFIED, FOUND) or self.refused_by in TARGETS.values() else ()


def by_name(
    kinds: Mapping[str, Iterable[tuple[str, Callable[[Path], None], str]]], stock: bool = False
) -> Iterator[tuple[str, Attack]]:
    """Attacks of several kinds: each a name, what makes a good checkpoint hostile, and why it may be accepted.

    Args:
        kinds: The attacks.
        stock: Whether they are on checkpoints of stock, of which `verify` reads less.
    """
    for kind, made in kinds.items():
        for name, build, harmless in made:
            attack = Attack(kind, build, harmless)
            readers = ("tools",) if stock else TARGETS.get(name.partition(":")[0], attack.refused_by)
            yield f"{kind}: {name}", replace(attack, refused_by=readers)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attack achieved, with each reader."""

    name: str
    outcomes: dict[str, str]
    texts: dict[str, str]
    seconds: float
    memory: int
    outside: tuple[str, ...]
    canary: bool

    def decision(self, attack: Attack) -> str:
        """The first outcome that is no acceptance, or "missed: " and why."""
        if self.canary:
            return "missed: code ran"
        if self.outside:
            return "missed: opened a file outside"
        if self.memory > MEMORY:
            return "missed: memory"
        missed = [outcome for outcome in self.outcomes.values() if outcome.startswith("missed")]
        if missed:
            return missed[0]
        accepted = [reader for reader in attack.must_refuse if self.outcomes.get(reader) in ("accepted", OTHER_DATA)]
        if accepted:
            return f"missed: accepted by {', '.join(accepted)}"
        if OTHER_DATA in self.outcomes.values() and attack.harmless in ("", VERIFIED, LONG):
            return f"missed: {OTHER_DATA}"
        return next((said for said in self.outcomes.values() if said not in ("accepted", OTHER_DATA)), "accepted")


OTHER_DATA = "other tensors than were saved"


def open_everything(directory: Path) -> str:
    """All that the reader offers."""
    source = open_checkpoint(find_checkpoint(directory))
    source.hyperparameters([handmade.NAME, "weight"])
    source.hyperparameters()
    sizes_of(record.coordinates for record in source.ranks())
    for key, chunks in source.chunks(list(source.metadata.keys)).items():
        check_coverage({key: [whole(source.metadata.keys[key].shape)]}, {key: chunks})
        for chunk in chunks:
            source.read(chunk)
    check_other_files(source.metadata, content=True)
    return "accepted"


def load(directory: Path, rank: int, needed: dict[str, list[Box]]) -> str:
    """What a load reads on one rank that needs some boxes."""
    source = open_checkpoint(find_checkpoint(directory), near=[rank])
    for key in needed:
        entry, expected = source.metadata.keys.get(key), handmade.KEYS[key]
        if entry is None or (entry.dtype, entry.shape, entry.kind) != (expected.dtype, expected.shape, expected.kind):
            raise KeyMismatchError(expected=str(expected), found=str(entry), remedy="", key=key)
    if not _are_those_saved(source.hyperparameters([handmade.NAME])):
        return OTHER_DATA
    source.stateless([handmade.NAME])
    source.near({"rank": rank, "pipeline": 0, "tensor": rank})
    list(source.states(["decoder"]))
    chunks = source.chunks(sorted(needed), needed)
    check_coverage(needed, chunks)
    check_other_files(source.metadata, content=True)
    found = [(chunk, source.read(chunk)) for parts in chunks.values() for chunk in parts]
    filled = all(_is_what_was_saved(chunk.key, chunk.box, tensor, needed[chunk.key]) for chunk, tensor in found)
    return "accepted" if filled else OTHER_DATA


def _are_those_saved(found: dict[str, dict[str, Any]]) -> bool:
    """Whether hyperparameters are those saved; what has another type may not be comparable."""
    own, saved = found.get(handmade.NAME, {}), handmade.HYPERPARAMETERS
    return own.keys() == saved.keys() and all(type(own[n]) is type(saved[n]) and own[n] == saved[n] for n in saved)


def _is_what_was_saved(key: str, box: Box, found: torch.Tensor, needed: list[Box]) -> bool:
    """Whether what a load fills from a chunk is; the rest of a chunk goes nowhere."""
    tensor = handmade.TENSORS[key]
    everything = whole(tuple(tensor.shape))
    parts = filter(None, (box.intersect(wanted) for wanted in needed))
    return all(torch.equal(tensor[part.slices_in(everything)], found[part.slices_in(box)]) for part in parts)


class _Watched(Unwatched):
    """So that `verify` finds out first how much there is."""

    shown = True


def audit(directory: Path) -> str:
    """`verify`, every byte."""
    report = verify(find_checkpoint(directory), header=False, workers=2, progress=_Watched())
    return "accepted" if not report.damage else "found by verify"


def readers(directory: Path) -> dict[str, Callable[[Path], str]]:
    """Who reads a checkpoint, by name; of one of stock, there are not so many."""
    if not (directory / "manifest.json").exists():
        return {"tools": open_everything, "verify": audit}
    alone = not (directory / handmade.payload(1)).exists()
    everything = {key: [whole(entry.shape)] for key, entry in handmade.KEYS.items()}
    own = everything if alone else {key: [box] for key, box in handmade.HELD[0]}
    return {
        "tools": open_everything,
        "same": partial(load, rank=0, needed=own),
        "other": partial(load, rank=1, needed=everything),
        "more": partial(load, rank=2, needed=everything),
        "verify": audit,
    }


def _led_to(path: str, flags: int) -> str:
    """What is opened in the end; a link that is not followed is itself."""
    if flags & os.O_NOFOLLOW:
        return os.path.realpath(Path(path).parent) + os.sep + Path(path).name
    return os.path.realpath(path)


def watch(directory: Path, opened: list[str]) -> None:
    """Record every path that is opened outside the checkpoint, from now on."""
    libraries = (
        sys.prefix,
        os.path.realpath(sys.prefix),
        sys.base_prefix,
        str(Path(__file__).parents[2]),
        "/proc",
        "/sys",
        "/usr",
        "/lib",
    )
    lease = str(directory.parent / READING)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
            opened.append(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = _led_to(os.fsdecode(arguments[0]), int(arguments[2]))
            if path != str(directory) and not path.startswith((str(directory) + os.sep, lease, *libraries)):
                opened.append(path)

    sys.addaudithook(hook)


def _attempt(directory: Path, address_space: int) -> dict[str, Any]:
    opened: list[str] = []
    watch(directory, opened)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space, mapped + address_space))
    signal.alarm(WALL_SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF)
    outcomes, texts, longest = dict[str, str](), dict[str, str](), 0.0
    for name, read in readers(directory).items():
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + CPU_SECONDS, resource.RLIM_INFINITY))
        outcomes[name], texts[name] = _outcome(read, directory)
        longest = max(longest, time.process_time() - began)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss) * 1024
    return {"outcomes": outcomes, "texts": texts, "seconds": longest, "memory": memory, "outside": tuple(opened)}


def _outcome(read: Callable[[Path], str], directory: Path) -> tuple[str, str]:
    try:
        return read(directory), ""
    except CheckpointError as error:
        return type(error).__name__, str(error)[:600]
    except BaseException as error:  # whatever it is, it is what the attack achieved, and the parent decides
        return "missed: another exception", f"{type(error).__name__}: {str(error)[:600]}"


def forked(action: Callable[[], Any]) -> tuple[int, Any]:
    """Run something in a child; its wait status and what it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(action(), pipe)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, json.loads(said) if status == 0 else None


def run(name: str, attack: Attack, folder: Path) -> Seen:
    """One attack, in a folder of its own."""
    root = folder / "case"
    root.mkdir()
    (root / SIDE).write_bytes(b"secret" * 1000)
    directory = handmade.make(root / "iter_0000010")
    canary = root / CANARY
    os.chdir(root)  # attacks create the canary by its base name
    status, _ = forked(lambda: attack.build(directory))
    assert status == 0, f"{name} could not be built"
    began = time.monotonic()
    status, seen = forked(lambda: _attempt(directory, attack.address_space))
    if seen is None:
        said = f"signal {os.waitstatus_to_exitcode(status)} after {time.monotonic() - began:.0f} s"
        seen = {"outcomes": {"": "missed: killed"}, "texts": {"": said}, "seconds": 0.0, "memory": 0, "outside": ()}
    found = Seen(name=name, canary=canary.exists(), **seen)
    os.chdir(folder)
    shutil.rmtree(root)
    return found


def main() -> None:
    """Run the named cases; see the module."""
    from tests.soak.attacks import ATTACKS

    folder = Path(sys.argv[1])
    for name in json.load(sys.stdin):
        print(json.dumps(asdict(run(name, ATTACKS[name], folder))), flush=True)


if __name__ == "__main__":
    main()

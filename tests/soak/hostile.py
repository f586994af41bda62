"""Runs attacks on the reader, each in a process of its own, and measures what they achieve.

    parent: imports once --fork--> builds the attack, ends
                         --fork--> limits itself, opens everything, reports error, opened files, canary, seconds, memory

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.hosts.root import find_checkpoint
from mbridge_fsdp_ckpt.loading.match import check_coverage
from mbridge_fsdp_ckpt.plan.boxes import whole
from mbridge_fsdp_ckpt.storage.opening import check_other_files, open_checkpoint
from mbridge_fsdp_ckpt.storage.source import sizes_of
from tests.unit import handmade

ADDRESS_SPACE = 3 << 29  # 1.5 GiB more than the imports had mapped
MEMORY = 3 << 29  # resident, more than after the imports
CPU_SECONDS = 10  # then the process is killed
WALL_SECONDS = 120  # for what waits without computing, on a busy machine
CANARY = "canary"
SIDE = "outside"
"""A file beside the checkpoint that must not be opened."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A case.

    Args:
        kind: What the report counts it under.
        build: Given a good checkpoint's directory, makes it hostile.
        harmless: Why the reader may accept it; empty where it must not.
        address_space: What the reader may map.
    """

    kind: str
    build: Callable[[Path], None]
    harmless: str = ""
    address_space: int = ADDRESS_SPACE


def by_name(kinds: Mapping[str, Iterable[tuple[str, Callable[[Path], None], str]]]) -> Iterator[tuple[str, Attack]]:
    """Attacks of several kinds: each a name, what makes a good checkpoint hostile, and why it may be accepted."""
    for kind, made in kinds.items():
        for name, build, harmless in made:
            yield f"{kind}: {name}", Attack(kind, build, harmless)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attack achieved."""

    name: str
    outcome: str
    text: str
    seconds: float
    memory: int
    outside: tuple[str, ...]
    canary: bool

    def verdict(self, attack: Attack) -> str:
        """The outcome, or "missed: " and why."""
        if self.canary:
            return "missed: code ran"
        if self.outside:
            return "missed: opened a file outside"
        if self.memory > MEMORY:
            return "missed: memory"
        if self.outcome == "accepted" and not attack.harmless:
            return "missed: accepted"
        return self.outcome


def open_everything(directory: Path) -> None:
    """All that the reader offers."""
    source = open_checkpoint(find_checkpoint(directory))
    source.hyperparameters([handmade.NAME, "weight"])
    sizes_of(record.coordinates for record in source.ranks())
    for key, chunks in source.chunks(list(source.head.keys)).items():
        check_coverage({key: [whole(source.head.keys[key].shape)]}, {key: chunks})
        for chunk in chunks:
            source.read(chunk)
    check_other_files(source.head, content=True)


def _led_to(path: str, flags: int) -> str:
    """What is opened in the end; a link that is not followed is itself."""
    if flags & os.O_NOFOLLOW:
        return os.path.realpath(Path(path).parent) + os.sep + Path(path).name
    return os.path.realpath(path)


def watch(directory: Path, opened: list[str]) -> None:
    """Record every path that is opened outside the checkpoint, from now on."""
    libraries = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc", "/sys", "/usr", "/lib")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
            opened.append(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = _led_to(os.fsdecode(arguments[0]), int(arguments[2]))
            if path != str(directory) and not path.startswith((str(directory) + os.sep, *libraries)):
                opened.append(path)

    sys.addaudithook(hook)


def _attempt(directory: Path, address_space: int) -> dict[str, Any]:
    opened: list[str] = []
    watch(directory, opened)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space, mapped + address_space))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.alarm(WALL_SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        open_everything(directory)
        outcome, text = "accepted", ""
    except CheckpointError as error:
        outcome, text = type(error).__name__, str(error)[:600]
    except BaseException as error:  # whatever it is, it is what the attack achieved, and the parent judges
        outcome, text = "missed: another exception", f"{type(error).__name__}: {str(error)[:600]}"
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = (after.ru_maxrss - before.ru_maxrss) * 1024
    return {"outcome": outcome, "text": text, "seconds": seconds, "memory": memory, "outside": tuple(opened)}


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
        seen = {"outcome": "missed: killed", "text": said, "seconds": 0.0, "memory": 0, "outside": ()}
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

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Roots of runs side by side, described first and then made; what is doomed in them follows from the description.

Nothing here asks the package what may go, and nothing is looked up on disk: `left` computes it from the case.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.trackers import STATE, TRACKER, state

HOUR = 3600.0
SAVE = "fedcba987654"
"""Of the objects of a save that goes on."""
LINKED, ALONE, DEAD = 0, 77, 71
"""Iterations: a link, one of which only what an overwriting put aside is there, and old objects of a dead save."""

NAMES = (
    ("run[1]", "run1"),
    ("a*b", "axb"),
    ("q?", "q1"),
    ("[!x]", "y"),
    ("with space", "with%20space"),
    ("läuf-Ä", "lauf-A"),
    ("a#b", "a"),
    ("{a,b}", "a"),
    ("~root", "root"),
    ("-rf", "rf"),
    ("plain", "plain2"),
)
"""A run, and one beside it that its name matches as a pattern, or is otherwise close to."""

STORES = "file system", "in memory", "S3"
PATHS = "prune", "retention", "removal thread", "repair", "overwriting save", "failed save", "aborted conversion"
EVENTS = {
    "prune": ("nothing", "a rewind", "a reader comes", "a tracker becomes illegible", "saved anew"),
    "retention": ("nothing", "a rewind", "a reader comes", "a tracker becomes illegible", "saved anew"),
    "removal thread": ("nothing", "a rewind", "a reader comes", "a tracker becomes illegible", "saved anew"),
    "repair": ("nothing", "a leftover is renewed", "saved anew"),
    "overwriting save": ("nothing", "a pruning follows the commit"),
    "failed save": ("nothing",),
    "aborted conversion": ("nothing",),
}
"""What happens between the decision and the deed."""

TRACKERS = "none", "Megatron's", "Bridge's", "both", "Bridge's newer", "Bridge's older", "gone", "illegible", "release"

ANYWHERE = (
    "reader",
    "reader of the other run",
    "stale lease",
    "lease of another name",
    "saved just now",
    "somebody's file in it",
    "a root in it",
    "objects of a save in it",
    "a copy of another spelling",
    "tracker with CRLF",
    "root spelled otherwise",
)
LOCAL = (
    *("reader through a link", "link beside", "link into it", "link out of it", "a link under an iteration's name"),
    *("root through a link", "tracker through a link", "folder that looks like a leftover, a link"),
)
LEFTOVERS = (
    *("staging, old", "staging, young", "staging of a longer name, old", "deleted, old", "deleted, young"),
    *("replaced, old", "replaced, alone", "temporary, old", "temporary, young", "dead objects, old"),
    "dead objects, young",
)

Files = dict[str, bytes]
"""By path: bytes of a file, or where a link leads after `LINK`."""

LINK = b"-> "


@dataclass(frozen=True)
class Case:
    """One root, what is in it, and who deletes.

    Args:
        store: Where it lies.
        path: Who deletes.
        event: What happens between the decision and the deed.
        names: The run's and its neighbour's.
        kinds: By iteration: "ours", "stock", "damaged" (ours without a payload file) or "headless".
        trackers: One of `TRACKERS`.
        named: The iteration that they name, and one before it.
        special: What else is there, and of which iteration.
        keep: Of pruning.
        also_keep: Of retention.
        target: What a save or a conversion is to write, or a removal thread to remove.
        marker: Whether a save commits by marker.
        other: The iteration of an event.
        late: Whether the event comes between the last look before a removal and the removal.
    """

    store: str
    path: str
    event: str
    names: tuple[str, str] = NAMES[0]
    kinds: dict[int, str] = field(default_factory=dict)
    trackers: str = "none"
    named: tuple[int, int] = (0, 0)
    special: frozenset[tuple[str, int]] = frozenset()
    keep: int = 1
    also_keep: int | None = None
    target: str = ""
    marker: bool = False
    other: int = 0
    late: bool = False

    def has(self, what: str, number: int | None = None) -> bool:
        """Whether something is there, of an iteration or of any."""
        return any(what == name and number in (None, n) for name, n in self.special)

    def of(self, what: str) -> list[int]:
        """Iterations of which something is there."""
        return sorted(n for name, n in self.special if name == what)

    @property
    def is_local(self) -> bool:
        return self.store == "file system"

    @property
    def has_times(self) -> bool:
        """Whether the store tells when something was touched: where none does, nothing is old."""
        return self.store != "in memory"

    @property
    def complete(self) -> list[int]:
        found = [number for number, kind in self.kinds.items() if kind != "headless"]
        return sorted([*found, *self.of("a link under an iteration's name")])

    @property
    def readable(self) -> list[int]:
        return [number for number in self.complete if self.kinds.get(number) != "damaged"]


def name_of(number: int) -> str:
    return f"iter_{number:07d}"


def drawn(store: str, path: str, event: str, seed: str) -> Case:
    """A case, drawn at random."""
    rng = random.Random(f"deletions {store} {path} {event} {seed}")
    numbers = sorted(rng.sample(range(1, 60), rng.randint(2, 5)))
    kinds = {number: rng.choice(("ours", "ours", "ours", "stock", "headless", "damaged")) for number in numbers}
    kinds[numbers[0]] = "ours"
    choices = [*ANYWHERE, *LEFTOVERS, *(LOCAL if store == STORES[0] else ())]
    old = numbers[: max(1, len(numbers) // 2)]  # of which more may go
    special = {(rng.choice(choices), rng.choice((*old, *numbers))) for _ in range(rng.randint(0, 7))}
    fixed = {"a link under an iteration's name": LINKED, "replaced, alone": ALONE}
    special = {(what, fixed.get(what, number)) for what, number in special}
    named = sorted(rng.choices(numbers, k=2), reverse=True)
    target = name_of(rng.choice(numbers))
    names = rng.choice(NAMES)
    if path not in ("removal thread", *PATHS[:2]):
        target = rng.choice((target, target, name_of(61), names[0]))
    marker = path in ("overwriting save", "failed save") and (store != STORES[0] or rng.random() < 0.4)
    trackers = rng.choice(TRACKERS[1:] if event == "a pruning follows the commit" else TRACKERS)
    case = Case(store, path, event, names, kinds, trackers, (named[0], named[1]), frozenset(special))
    also = rng.choice((None, None, rng.choice(numbers))) if path == "retention" else None
    other = DEAD if path == "repair" else rng.choice(numbers)
    case = replace(case, keep=rng.randint(1, 3), also_keep=also, target=target, marker=marker, other=other)
    return replace(case, late=event in EVENTS["prune"][1:4] and rng.random() < 0.4)


def trackers_of(kind: str, named: tuple[int, int]) -> Files:
    """What a root's trackers hold."""
    newer, older = named
    text: dict[str, Any] = {
        "Megatron's": newer, "both": newer, "Bridge's newer": older, "Bridge's older": newer, "gone": 99,
        "illegible": "ten", "release": "release",
    }  # fmt: skip
    states = {"Bridge's": newer, "both": newer, "Bridge's newer": newer, "Bridge's older": older}
    found = {TRACKER: str(text[kind]).encode()} if kind in text else {}
    return found | ({STATE: state(states[kind])} if kind in states else {})


def names_in_trackers(case: Case) -> set[int]:
    """Iterations that some tracker names."""
    newer, older = case.named
    named = {"Bridge's newer": {newer, older}, "Bridge's older": {newer, older}}
    named |= {kind: {newer} for kind in ("Megatron's", "Bridge's", "both")}
    return named.get(case.trackers, set())


def after(case: Case) -> Case:
    """The case when its event has happened."""
    if case.event == "a rewind":
        published = frozenset(one for one in case.special if one[0] != "saved just now")
        return replace(case, trackers="Megatron's", named=(case.other, case.other), special=published)
    if case.event == "a reader comes":
        return replace(case, special=case.special | {("reader", case.other)})
    if case.event == "a tracker becomes illegible":
        return replace(case, trackers="illegible")
    if case.event == "saved anew" and may_be_saved(case, name_of(case.other)):
        return _saved(case, case.other, by_marker=not case.is_local)
    return case


def number_in(name: str) -> int:
    return int(name[5:]) if name.startswith("iter_") else -1


def may_be_saved(case: Case, name: str) -> bool:
    """Whether a save may take a directory's place: it is no root."""
    return not case.has("a root in it", number_in(name))


def stays(case: Case, number: int) -> bool:
    """Whether a rule names a complete checkpoint that is old enough to go."""
    leads = any(case.has(what, number) for what in ("link beside", "link into it"))
    is_read = case.has("reader", number) or case.has("reader through a link", number)
    is_read |= case.has("stale lease", number) and not case.has_times
    unpublished = case.has("saved just now", number) and case.trackers != "none" and case.has_times
    is_other = case.has("a root in it", number) or number == LINKED
    is_other |= case.has("objects of a save in it", number)
    is_other |= case.has("objects of the save before in it", number) and not case.has_times
    return number in names_in_trackers(case) or is_read or leads or unpublished or is_other


def doomed(case: Case) -> set[int]:
    """Iterations that a pruning takes."""
    if case.trackers == "illegible":
        return set()
    old = {n for n in case.complete if sum(newer > n for newer in case.readable) >= case.keep}
    return {n for n in old if not stays(case, n) and n != case.also_keep}


def made(case: Case, whole: dict[str, Files]) -> list[tuple[str, bytes, float]]:
    """What to make above both runs: path, content, and how many seconds ago it was last touched.

    Args:
        case: What to make.
        whole: Files of real checkpoints: "ours" and "stock".
    """
    found: list[tuple[str, bytes, float]] = []
    for run in case.names:
        for number, kind in case.kinds.items():
            files = whole.get(kind) or {"__0_0.distcp": b"x", "rank_00000.index": b"y"}
            if kind == "damaged":
                files = {name: data for name, data in whole["ours"].items() if not name.startswith("__1_0")}
            age = 60.0 if case.has("saved just now", number) and run == case.names[0] else 3 * HOUR
            found += [(f"{run}/{name_of(number)}/{name}", data, age) for name, data in files.items()]
        strangers = "notes.txt", "tensorboard/events", "iter_x/manifest.json", "iter_0000070", ".staging-mine/a"
        found += [(f"{run}/{name}", b"somebody's", 3 * HOUR) for name in strangers]
    own, other = case.names
    found += [(f"{own}/{name}", data, age) for name, data, age in _special(case, whole["ours"])]
    found += [(f"{other}/{TRACKER}", str(min(case.kinds)).encode(), 2 * HOUR)]
    if case.target == own:
        found += [(f"{own}/{other}/{name}", data, 3 * HOUR) for name, data in whole["ours"].items()]
        found += [(f"{own}/{own}/{name}", data, 3 * HOUR) for name, data in whole["ours"].items()]
        found += [(f"{own}/.staging-{name}-{n:012x}/a", b"x", 0.0) for n, name in enumerate(case.names)]
    for name, data in trackers_of(case.trackers, case.named).items():
        if name == TRACKER and case.has("tracker with CRLF"):
            data += b"\r\n"
        if case.has("tracker through a link"):
            found.append((f"{own}/of-{name}", data, 2 * HOUR))
            name, data = name, LINK + f"of-{name}".encode()
        found.append((f"{own}/{name}", data, 2 * HOUR))
    if case.has("root through a link"):
        found.append(("by-link", LINK + own.encode(), 0.0))
    found += [(f"short-cut-{n}", LINK + f"{own}/{name_of(n)}".encode(), 0.0) for n in case.of("reader through a link")]
    if case.has("a link under an iteration's name"):
        found += [(f"elsewhere/{name}", data, 3 * HOUR) for name, data in whole["ours"].items()]
    return found


def _special(case: Case, ours: Files) -> list[tuple[str, bytes, float]]:
    """The same for what has a place of its own in the root."""
    found: list[tuple[str, bytes, float]] = []
    other = f"../{case.names[1]}"
    for token, (what, number) in enumerate(sorted(case.special)):
        name, mark = name_of(number), f"{token + 16:012x}"
        old = 2 * HOUR if what.endswith("old") else 0.0
        places: dict[str, tuple[str, bytes]] = {
            "stale lease": (f".reading-{name}-{mark}", b""),
            "lease of another name": (f".reading-{name}-copy-{mark}", b""),
            "somebody's file in it": (f"{name}/notes/text.txt", b"z"),
            "a root in it": (f"{name}/{TRACKER}", b"1"),
            "link beside": (f"best-{number}", LINK + name.encode()),
            "link into it": (f"into-{number}", LINK + f"{name}/notes".encode()),
            "link out of it": (f"{name}/out", LINK + f"../{other}/tensorboard".encode()),
            "a link under an iteration's name": (name, LINK + b"../elsewhere"),
            "folder that looks like a leftover, a link": (f".staging-{name}-{mark}", LINK + other.encode()),
            "staging of a longer name, old": (f".staging-a-{name}-{mark}/a", b"x"),
            "replaced, old": (f".replaced-{name}-{mark}/a", b"x"),
        }
        if what in places:
            found.append((*places[what], 2 * HOUR if what == "stale lease" else old))
        if what == "a copy of another spelling":
            found += [(f"iter_{number}/{file}", data, 3 * HOUR) for file, data in ours.items()]
        if what == "link into it":
            found.append((f"{name}/notes/text.txt", b"z", 3 * HOUR))
        if what.startswith(("staging,", "deleted,")):
            found.append((f".{what.partition(',')[0]}-{name}-{mark}/a", b"x", old))
        if what.startswith("temporary"):
            found.append((f".{TRACKER}.{mark}.new", b"x", old))
        if what == "replaced, alone":
            found += [(f".replaced-{name_of(ALONE)}-{mark}/{file}", data, 2 * HOUR) for file, data in ours.items()]
        if what.startswith("dead objects"):
            folder = name_of(DEAD if old else 72)
            found += [(f"{folder}/__{rank}_0-{mark}.distcp", b"x", old) for rank in (0, 1)]
        if what == "objects of a save in it":
            found += [(f"{name}/{file}", b"x", 0.0) for file in OBJECTS]
    return list({path: (path, data, age) for path, data, age in found}.values())


OBJECTS = f"__0_0-{SAVE}.distcp", f"rank_00000-{SAVE}.index"


REPLACED = "manifest.json", ".metadata", "__0_1.distcp"
"""Of the names that are the same in each save, those that go by marker: metadata, and what it lists as added."""


@dataclass
class Left:
    """What has to be there in the end.

    Args:
        files: Exactly so.
        anew: Directories that a save has written: anything in them besides `files`, and metadata.
    """

    files: Files
    anew: set[str] = field(default_factory=set)

    def drop(self, *places: str) -> None:
        """Files of these names, or below them, go."""
        below = tuple(f"{place}/" for place in places)
        self.files = {p: data for p, data in self.files.items() if p not in places and not p.startswith(below)}
        self.anew -= set(places)


def left(case: Case, before: Files) -> Left:
    """What has to be there when a case's path and event are over."""
    found, then = Left(dict(before)), after(case)
    own = case.names[0]
    if case.path == "prune" and case.trackers == "illegible":  # refused before anything happens
        return found
    if case.event == "a rewind":
        found.drop(f"{own}/{STATE}")
    if case.event in ("a rewind", "a tracker becomes illegible"):
        found.files |= {f"{own}/{TRACKER}": trackers_of(then.trackers, then.named)[TRACKER]}
    if case.event == "saved anew":
        _save(case, name_of(case.other), found)
    if case.path == "prune":
        shown = doomed(case)
        if case.event == "saved anew" and may_be_saved(case, name_of(case.other)):  # it is another one since
            shown -= {case.other}
        _remove(then, shown & doomed(then), found)
    elif case.path == "retention":
        found.drop(*(path for path in before if is_stale_lease(case, path)))
        _remove(then, doomed(then) & (doomed(case) if case.late else doomed(then)), found)
    elif case.path == "removal thread":
        number, looks = number_in(case.target), (case, then) if case.late else (then,)
        goes = all(number in of.complete and not stays(of, number) and of.trackers != "illegible" for of in looks)
        _remove(then, {number} if goes else set(), found)
    elif case.path == "repair":
        _repair(case, before, found)
    elif case.path in ("overwriting save", "failed save"):
        _save(case, case.target, found, fails=case.path == "failed save")
        if case.event != "nothing" and may_be_saved(case, case.target):
            then = _saved(case, number_in(case.target), by_marker=case.marker or not case.is_local)
            found.drop(*(path for path in before if is_stale_lease(case, path)))
            _remove(then, doomed(then), found)
    return found


def _saved(case: Case, number: int, *, by_marker: bool) -> Case:
    """The case after a save; what that replaces by marker is deleted later than this."""
    if number < 0:
        return case
    young = ("objects of a save in it", number)
    special = case.special - {young} | {("saved just now", number)}
    if not by_marker:
        special -= {("link out of it", number), ("somebody's file in it", number), ("link into it", number)}
    elif young in case.special and case.kinds.get(number) != "headless":
        special |= {young}
    elif case.kinds.get(number) in ("ours", "damaged") and not case.is_local:
        special |= {("objects of the save before in it", number)}
    return replace(case, kinds=case.kinds | {number: "ours"}, special=frozenset(special))


def is_stale_lease(case: Case, path: str) -> bool:
    run, _, name = path.partition("/")
    return (
        case.has_times
        and run == case.names[0]
        and any(name.startswith(f".reading-{name_of(n)}-0") for n in case.of("stale lease"))
    )


def is_leftover(case: Case, path: str) -> bool:
    """Whether it is one whose age counts."""
    tops = [f"{case.names[0]}/{top}" for top, (kind, _, _) in leftovers(case, [path]).items() if kind]
    dead = f"{case.names[0]}/{name_of(DEAD)}"
    return path.startswith((*tops, dead)) or is_stale_lease(case, path)


def _remove(case: Case, numbers: Iterable[int], found: Left) -> None:
    own = case.names[0]
    for number in numbers:
        place = f"{own}/{name_of(number)}"
        stay = {}
        if case.has("objects of the save before in it", number):  # whose other files these are nobody can tell
            stay = {path: data for path, data in found.files.items() if path.startswith(f"{place}/")}
        found.drop(place)
        found.files |= stay


def leftovers(case: Case, paths: Iterable[str]) -> dict[str, tuple[str, str, bool]]:
    """Leftovers in the root that a file system has: the kind, the target, and whether it is old."""
    own, found = case.names[0], {}
    tops = {path.split("/")[1] for path in paths if path.startswith(f"{own}/")}
    for token, (what, number) in enumerate(sorted(case.special)):
        kind, _, age = what.partition(", ")
        name, mark = name_of(number), f"{token + 16:012x}"
        top = {
            "staging": f".staging-{name}-{mark}",
            "deleted": f".deleted-{name}-{mark}",
            "replaced": f".replaced-{name_of(ALONE) if age == 'alone' else name}-{mark}",
            "temporary": f".{TRACKER}.{mark}.new",
            "staging of a longer name": f".staging-a-{name}-{mark}",
        }.get(kind)
        if top in tops:
            aim = {"temporary": "", "staging of a longer name": f"a-{name}"}.get(kind, name)
            found[top] = kind, name_of(ALONE) if age == "alone" else aim, age != "young"
    if case.target == own:
        found |= {f".staging-{name}-{n:012x}": ("staging", name, False) for n, name in enumerate(case.names)}
    return {top: said for top, said in found.items() if top in tops}


def _is_complete(case: Case, name: str) -> bool:
    return number_in(name) in case.complete or (name in case.names and case.target == case.names[0])


def _save(case: Case, target: str, found: Left, *, fails: bool = False) -> None:
    """A save takes its own target's leftovers, and those of others that are old."""
    own, place = case.names[0], f"{case.names[0]}/{target}"
    if not may_be_saved(case, target):
        return
    marker = case.marker or not case.is_local
    if case.is_local:
        for top, (kind, aim, old) in leftovers(case, found.files).items():
            if (old or aim == target) and (kind != "replaced" or _is_complete(case, aim)):
                found.drop(f"{own}/{top}")
    parts = [path.removeprefix(f"{place}/") for path in found.files if path.startswith(f"{place}/")]
    suffixed = sorted(name for name in parts if "-" in name and name.startswith(("__", "rank_", "group_")))
    if fails:
        dead = suffixed[:-1] if marker and not {"manifest.json", ".metadata"} & {*parts} else []
        found.drop(*(f"{place}/{name}" for name in dead))
    elif marker:
        found.drop(*(f"{place}/{name}" for name in (*suffixed, *REPLACED)))
        found.anew.add(place)
    else:
        found.drop(place)
        found.anew.add(place)


def _repair(case: Case, before: Files, found: Left) -> None:
    own, renewed = case.names[0], case.event == "a leftover is renewed" or not case.has_times
    saved = case.event == "saved anew"
    complete, readable = set(case.complete), set(case.readable)
    for top, (kind, aim, old) in leftovers(case, before).items() if case.is_local else ():
        if kind == "replaced" and aim == name_of(ALONE):
            moved = {p.replace(top, aim): data for p, data in before.items() if p.startswith(f"{own}/{top}/")}
            found.drop(f"{own}/{top}")
            found.files |= moved
            complete.add(ALONE)
            readable.add(ALONE)
        elif old and not renewed and (kind != "replaced" or _is_complete(case, aim)):
            found.drop(f"{own}/{top}")
    if not renewed:
        found.drop(*(path for path in before if is_stale_lease(case, path)))
        found.drop(*() if saved else [f"{own}/{name_of(DEAD)}"])
    _repair_trackers(case, complete, max(readable, default=None), found)


def _repair_trackers(case: Case, complete: set[int], newest: int | None, found: Left) -> None:
    newer, older = case.named
    text = {"Bridge's newer": older, "Bridge's older": newer, "Megatron's": newer, "both": newer}.get(case.trackers)
    by_bridge = {"Bridge's newer": newer, "Bridge's older": older, "Bridge's": newer, "both": newer}.get(case.trackers)
    has_state = by_bridge is not None
    good = [number for number in (by_bridge, text) if number in complete]
    if text in complete and (by_bridge in complete or not has_state):
        return
    meant = good[0] if good else newest
    if meant is not None:
        found.files[f"{case.names[0]}/{TRACKER}"] = str(meant).encode()
        if has_state and by_bridge not in complete:
            found.drop(f"{case.names[0]}/{STATE}")

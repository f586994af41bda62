# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What can lie where a run's root has its trackers, and which checkpoint every reader takes it to mean.

Each root has iterations 10 and 20, and a release.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

TRACKER, STATE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"
SECRET = "not for anybody's log"

Case = tuple[Callable[[Path], object], str]
"""What makes the trackers in a root; the directory that they name, or the beginning of an error's `found` after "!"."""


def state(step: int) -> bytes:
    """Bridge's tracker, as it saves it."""
    import io

    buffer = io.BytesIO()
    torch.save({"step": torch.tensor(step, dtype=torch.int32), "skipped_train_samples": torch.tensor(0)}, buffer)
    return buffer.getvalue()


def compressed(record: bytes) -> bytes:
    """The same archive with its parts compressed, as `torch.save` writes none: it could be larger than memory."""
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


def _text(content: str | bytes, step: int | None = None) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        (root / TRACKER).write_bytes(content if isinstance(content, bytes) else content.encode())
        if step is not None:
            (root / STATE).write_bytes(state(step))

    return make


def _state(content: bytes) -> Callable[[Path], object]:
    return lambda root: (root / STATE).write_bytes(content)


def _link(name: str, content: bytes) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        (root / "elsewhere").write_bytes(content)
        (root / "one").symlink_to("elsewhere")
        (root / name).symlink_to("one")

    return make


def _link_out(root: Path) -> None:
    """Who made the root may have made the link to see files of others."""
    (root.parent / "outside").write_text(SECRET)
    (root / TRACKER).symlink_to(root.parent / "outside")


def _gigabyte(root: Path) -> None:
    with (root / TRACKER).open("wb") as file:
        file.truncate(1 << 30)


CASES: dict[str, Case] = {
    "no tracker": (lambda root: None, ""),
    "a number": (_text("10"), "iter_0000010"),
    "a number, padded": (_text(" 0000010\r\n"), "iter_0000010"),
    "the newest": (_text("20"), "iter_0000020"),
    "a release": (_text("release\n"), "release"),
    "one that is gone": (_text("30"), "!iter_0000010, iter_0000020"),
    "empty": (_text(""), "!''"),
    "garbage": (_text("ten"), "!'ten'"),
    "a path": (_text("../iter_0000010"), "!'../iter_0000010'"),
    "negative": (_text("-1"), "!'-1'"),
    "with a sign": (_text("+10"), "!'+10'"),
    "two numbers": (_text("10 20"), "!'10 20'"),
    "foreign digits": (_text("\u0661\u0660"), "!'\u0661\u0660'"),
    "binary": (_text(b"\xff\xfe10\x00"), "!'\ufffd\ufffd10"),
    "many digits": (_text("9" * 5000), "!a file of 5000 bytes"),
    "huge": (_gigabyte, "!a file of 1073741824 bytes"),
    "a directory": (lambda root: (root / TRACKER).mkdir(), "!a directory"),
    "a pipe": (lambda root: os.mkfifo(root / TRACKER), "!neither a file nor a directory"),
    "a link to a file": (_link(TRACKER, b"10\n"), "iter_0000010"),
    "a link to something else": (_link(TRACKER, b"ten"), "!a link to "),
    "a link that leads out": (_link_out, "!a link to "),
    "a dangling link": (lambda root: (root / TRACKER).symlink_to("gone"), "!a link to "),
    "a link to itself": (lambda root: (root / TRACKER).symlink_to(TRACKER), "!a link to "),
    "Bridge's alone": (_state(state(10)), "iter_0000010"),
    "Bridge's alone, gone": (_state(state(30)), "!iter_0000010, iter_0000020"),
    "Bridge's alone, damaged": (_state(b"PK\3\4 nothing"), "!no train state"),
    "Bridge's alone, compressed": (
        _state(compressed(state(10))),
        "!no train state of Bridge's: ValueError: a compressed",
    ),
    "Bridge's alone, of another kind": (_state(state(10).replace(b"step", b"pets")), "!no train state"),
    "Bridge's alone, a link": (_link(STATE, state(10)), "iter_0000010"),
    "Bridge's alone, a dangling link": (lambda root: (root / STATE).symlink_to("gone"), "!a link to "),
    "both": (_text("20", 20), "iter_0000020"),
    "both, Bridge's newer": (_text("10", 20), "iter_0000020"),
    "both, Bridge's older": (_text("20", 10), "!iter_0000010, and iter_0000020 in"),
    "both, Bridge's gone": (_text("20", 30), "iter_0000020"),
    "both, Megatron's gone": (_text("30", 20), "iter_0000020"),
    "both, both gone": (_text("30", 40), "!iter_0000010, iter_0000020"),
    "both, Bridge's of no release": (_text("release", 20), "!iter_0000020, and release in"),
}

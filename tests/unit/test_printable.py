# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says, on a terminal: shown, never obeyed."""

from __future__ import annotations

import pytest

from mbridge_fsdp_ckpt.errors import CheckpointError, brief
from mbridge_fsdp_ckpt.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.weight", "model.weight"),
        ("schön 漢字 עברית 😀 [red] <b> a\\b", "schön 漢字 עברית 😀 [red] <b> a\\b"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),  # C1: one byte for ESC [
        ("a\r\nb\tc\x00\x7f", "a\\r\\nb\\tc\\x00\\x7f"),
        ("\u202eevil\u2066\u200b", "\\u202eevil\\u2066\\u200b"),  # text that runs backwards, text of no width
        ("\u2028\u2029\u00a0", "\\u2028\\u2029\\xa0"),
        ("\ud800 \U000e0041", "\\ud800 \\U000e0041"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_python_writes_it(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    shown.encode()


def test_every_character_is_printable_afterwards() -> None:
    assert all(printable(chr(point)).isprintable() for point in range(0x110000))


def test_an_error_is_one_line_and_keeps_what_was_given() -> None:
    key = "\x1b]52;c;aGk=\x07\nIntact."
    error = CheckpointError(expected=key, found=key, remedy=key, key=key, host=key, phase=key, rank=1)
    assert str(error).isprintable()
    assert str(error).count("\\x1b]52;c;aGk=\\x07\\nIntact.") == 6
    assert (error.key, CheckpointError.from_wire(error.to_wire()).key) == (key, key)


def test_what_others_raised_is_cited_without_its_escapes() -> None:
    assert brief(ValueError("\x1b[2J gone\nand more")) == "ValueError: \\x1b[2J gone"

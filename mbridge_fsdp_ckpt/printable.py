# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Text that others wrote, made fit to be printed.

Keys, file names and whatever else a checkpoint says may hold characters that a terminal obeys (titles, clipboard,
cursor), that end a line, or that run text backwards.  All that prints such text goes through here: messages of errors,
the command's output, the pages it writes.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text in one line, every character that does not print written as a Python string literal has it."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What all pages have in common.

A page is a template of Jinja's that extends `page.html`, and links to nothing.  Whatever it prints is made printable
first, and then escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mbridge_fsdp_ckpt.printable import printable

FEW = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE8866", "#777777")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart, and an orange."""


def elided(text: str, limit: int) -> str:
    """Text of at most so many characters, all of which print, without its middle."""
    text, keep = printable(text), limit - 1
    return text if len(text) <= limit else f"{text[: keep // 3]}…{text[len(text) - (keep - keep // 3) :]}"


def render(template: str, names: Mapping[str, Any], **values: Any) -> str:
    """A page.

    Args:
        template: Its file, below this folder.
        names: Functions that it calls.
        values: What it shows.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=_as_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= names
    return environment.get_template(template).render(**values)


def _as_text(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What all pictures and pages have in common.

A page is a template of Jinja's that extends `page.html`, and links to nothing.  Whatever it prints is made printable
first, and then escaped.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mbridge_fsdp_ckpt.errors import ConfigurationError
from mbridge_fsdp_ckpt.printable import printable

INK, FAINT, EMPTY = "#222222", "#666666", "#eeeeee"
FEW = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE8866", "#777777")
"""Paul Tol's bright scheme, told apart by colour-blind readers, and an orange."""
AS_IT_IS: Any = {"parse_math": False}
"""A dollar in a name begins no formula."""


def require_matplotlib(instead: str = "--html needs nothing.") -> Any:
    """The class `Figure` of matplotlib.

    Args:
        instead: What does without it.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            expected="matplotlib, to draw a picture",
            found=str(error),
            remedy=f"Install it: pip install 'mbridge-fsdp-ckpt[tools]'. {instead}",
        ) from error
    return Figure


def write_heading(figure: Any, directory: str, said: str, height: float) -> None:
    """The first two lines of a picture: a directory, and what is said of it.

    Args:
        figure: The picture.
        directory: The checkpoint.
        said: The second line.
        height: Of the picture, inches.
    """
    name = elided(directory, 110)
    figure.text(0.015, 1 - 0.32 / height, name, fontsize=13, fontweight="bold", color=INK, **AS_IT_IS)
    figure.text(0.015, 1 - 0.6 / height, printable(said), fontsize=10, color=FAINT, **AS_IT_IS)


def write_notes(figure: Any, notes: Iterable[str], bottom: float, height: float) -> None:
    """Lines below a picture's axes, which end `bottom` inches above its end; `height` is its height in inches."""
    for index, note in enumerate(notes):
        place = (bottom - 0.62 - 0.2 * index) / height
        figure.text(0.015, place, note, fontsize=9, color=FAINT, **AS_IT_IS)


def content_of(figure: Any, kind: str = "png") -> bytes:
    """A picture as a file: "png" or "svg"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    return buffer.getvalue()


def tidy(axes: Any, keep: str) -> None:
    """Axes without a frame, but for one side of it."""
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(side == keep)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8)


def folded(notes: Iterable[str]) -> list[str]:
    """Sentences below a picture, in lines that fit."""
    return [line for note in notes for line in textwrap.wrap(printable(note), 150)]


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

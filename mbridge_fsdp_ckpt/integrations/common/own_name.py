# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Errors of a framework that is shown the stock format's name in place of this format's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mbridge_fsdp_ckpt.format.names import STOCK_FORMAT


@contextmanager
def naming_format_in_errors(name: str) -> Iterator[None]:
    """Put the format's name that the user gave into errors that are raised in the block and name the stock format.

    Args:
        name: The name that the user gave.
    """
    try:
        yield
    except Exception as error:
        error.args = tuple(
            re.sub(rf"\b{STOCK_FORMAT}\b", name, text) if isinstance(text, str) else text for text in error.args
        )
        raise

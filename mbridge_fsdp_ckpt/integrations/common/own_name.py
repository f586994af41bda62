# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What a framework refuses while it takes this format for stock's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mbridge_fsdp_ckpt.format.names import STOCK_FORMAT


@contextmanager
def refusing_as(name: str) -> Iterator[None]:
    """Let errors of the framework say the format's name that the user gave, where they say stock's.

    Args:
        name: What the user gave.
    """
    try:
        yield
    except Exception as error:
        error.args = tuple(
            re.sub(rf"\b{STOCK_FORMAT}\b", name, text) if isinstance(text, str) else text for text in error.args
        )
        raise

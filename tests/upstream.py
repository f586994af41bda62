# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which release of upstream's is installed: what an older one cannot do is skipped there, with the reason."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def is_before(package: str, release: str) -> bool:
    """Whether an older release of a package is installed; one that is not installed is none."""
    try:
        return Version(version(package)) < Version(release)
    except PackageNotFoundError:
        return False

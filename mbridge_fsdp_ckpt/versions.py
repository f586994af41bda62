"""Which versions of other packages this release was made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mbridge_fsdp_ckpt.errors import UnsupportedVersionError

SUPPORTED = {
    "torch": ">=2.13,<2.14",
    "megatron-core": ">=0.19,<0.20",
    "megatron-bridge": ">=0.6,<0.7",
    "transformer-engine": ">=2.20,<2.21",
    "verl": "==0.9.1",
}


def require(*packages: str) -> None:
    """Check installed versions (of the distributions: Megatron's `__version__` changes with the working directory).

    Raises:
        UnsupportedVersionError: A package is missing, or of a version whose internals may differ.
    """
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        # containers ship builds such as 2.13.0a0+nv: what counts is the release they are of
        if found == "none" or Version(found).base_version not in SpecifierSet(SUPPORTED[package]):
            raise UnsupportedVersionError(
                expected=f"{package}{SUPPORTED[package]}",
                found=f"{package} {found}" if found != "none" else f"no {package} installed",
                remedy=f"Install a supported version (pip install '{package}{SUPPORTED[package]}'), or a release of "
                "mbridge-fsdp-ckpt made for yours; docs/compatibility.md has the list.",
            )

"""Which versions of other packages this release was made for, and which a checkpoint was written with."""

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
_TRAINERS = ("megatron-core", "megatron-bridge", "transformer-engine")


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


def writer_versions(*, training: bool) -> dict[str, str]:
    """Versions of the packages that write a checkpoint, as far as they are installed: from a training job, or a file.

    They stand in the head for a person to read; nothing depends on them.
    """
    found = {}
    for package in ("mbridge-fsdp-ckpt", "torch", *(_TRAINERS if training else ())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Checks that installed packages have the names that this package uses, and the versions that were tested.

A release that has every name runs; outside the tested versions a warning is logged once.  Names of modules are looked
up by `require`, attributes of objects that upstream hands over by `probe`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mbridge_fsdp_ckpt.attributes import ATTRIBUTES
from mbridge_fsdp_ckpt.errors import UnsupportedVersionError
from mbridge_fsdp_ckpt.probes import PROBES, Need, Probe

TESTED = {
    "torch": ">=2.11,<2.16",
    "megatron-core": ">=0.18,<0.20",
    "megatron-bridge": ">=0.5,<0.7",
    "transformer-engine": ">=2.16,<2.21",
    "verl": ">=0.9,<0.9.2",
}
"""The window in which the tests ran; docs/compatibility.md says which version ran what."""

_DISTRIBUTIONS = {
    "torch.": "torch",
    "megatron.bridge.": "megatron-bridge",
    "megatron.": "megatron-core",
    "transformer_engine.": "transformer-engine",
    "verl.": "verl",
}
"""By the beginning of a module's name; the first that fits."""

_MAKERS = {"a FusedAdam": "transformer-engine", "a MegatronCheckpointManager": "verl"}
"""The distributions whose objects are looked at; megatron-core's where none is named."""

_TRAINERS = ("megatron-core", "megatron-bridge", "transformer-engine")
_log = logging.getLogger(__name__)


@cache
def require(*needs: Need) -> None:
    """Look up every name that is needed, once a process.

    Versions are those of the distributions: Megatron's `__version__` changes with the working directory.

    Raises:
        UnsupportedVersionError: A package is not installed, or lacks one of the names.
    """
    for need in needs:
        for package in dict.fromkeys(distribution_of(probe) for probe in PROBES[need]):
            _warn_outside(package)
        for probe in PROBES[need]:
            module = _imported(probe)
            for name in probe.names.split():
                _check(probe, module, name)


def probe(subject: str, value: object) -> None:
    """Look up the attributes that are read of an object.

    Args:
        subject: What it is: a key of `ATTRIBUTES`.
        value: The object.

    Raises:
        UnsupportedVersionError: It has not all of them.
    """
    for file, names in ATTRIBUTES[subject].items():
        for name in names.split():
            if not _has(value, name):
                raise lacking(f"{name} of {subject}", file, _MAKERS.get(subject, "megatron-core"))


def forget() -> None:
    """Look everything up again when it is needed next: another version was put in place, by a test."""
    require.cache_clear()
    _warn_outside.cache_clear()


def distribution_of(probe: Probe) -> str:
    """The distribution that has a probe's module."""
    return next(package for prefix, package in _DISTRIBUTIONS.items() if probe.module.startswith(prefix))


def parse(name: str) -> tuple[str, tuple[str, ...]]:
    """What is looked up, and what it is called with by name: "a.b(c,d)" -> "a.b", ("c", "d")."""
    path, _, parameters = name.rstrip(")").partition("(")
    return path, tuple(filter(None, parameters.split(",")))


def _imported(probe: Probe) -> Any:
    try:
        return importlib.import_module(probe.module)
    except ImportError as error:
        raise lacking(probe.module, probe.file, distribution_of(probe), f": {error}") from error


def _check(probe: Probe, module: Any, name: str) -> None:
    path, parameters = parse(name)
    if not _has(module, path):
        raise lacking(f"{probe.module}.{path}", probe.file, distribution_of(probe))
    if parameters:
        taken = inspect.signature(_at(module, path)).parameters
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        missing = [parameter for parameter in parameters if parameter not in taken]
        if missing and not is_open:
            what = f"{probe.module}.{path} with {', '.join(missing)}"
            raise lacking(what, probe.file, distribution_of(probe))


def _has(value: object, path: str) -> bool:
    try:
        _at(value, path)
    except AttributeError:
        return False
    return True


def _at(value: object, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def lacking(what: str, file: str, package: str, why: str = "") -> UnsupportedVersionError:
    """The error that names what is not there, who needs it, and which versions have it."""
    tested = f"{package}{TESTED[package]}"
    return UnsupportedVersionError(
        expected=f"{what}, which {file} needs",
        found=f"{_said(package)} without it{why}",
        remedy=f"Install a tested version (pip install '{tested}'), or a release of mbridge-fsdp-ckpt that supports "
        "yours; docs/compatibility.md lists them.",
    )


@cache
def _warn_outside(package: str) -> None:
    """Say once that a version was not tested."""
    found = _installed(package)
    # containers ship builds such as 2.13.0a0+nv: what counts is the release they are of
    is_tested = found is not None and Version(found).base_version in SpecifierSet(TESTED[package])
    if not is_tested and os.environ.get("RANK", "0") == "0":
        names = sum(
            len(probe.names.split())
            for probes in PROBES.values()
            for probe in probes
            if distribution_of(probe) == package
        )
        _log.warning(
            "%s is outside the versions with which mbridge-fsdp-ckpt was tested (%s). The run continues: the %d names "
            "that this package uses there are looked up first",
            _said(package),
            TESTED[package],
            names,
        )


def _said(package: str) -> str:
    """A package with its installed version; a checkout of Megatron-LM on the path is not installed, and has none."""
    found = _installed(package)
    return f"{package} {found}" if found is not None else f"{package} of unknown version (not installed by pip)"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def writer_versions(*, training: bool) -> dict[str, str]:
    """Versions of the packages that write a checkpoint, as far as they are installed: from a training job, or a file.

    They stand in the metadata for a person to read; nothing depends on them.
    """
    return dict(_versions_of("mbridge-fsdp-ckpt", "torch", *(_TRAINERS if training else ())))


@cache
def _versions_of(*packages: str) -> dict[str, str]:
    """Looked up once: each look reads a file, in every commit."""
    found = {package: _installed(package) for package in packages}
    return {package: installed for package, installed in found.items() if installed is not None}

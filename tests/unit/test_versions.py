"""Versions are checked against installed distributions, and the error says what would work."""

from importlib.metadata import PackageNotFoundError

import pytest
from packaging.requirements import Requirement

from mbridge_fsdp_ckpt import versions
from mbridge_fsdp_ckpt.errors import UnsupportedVersionError


def install(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.13.0"),
        ("torch", "2.13.1+cu130"),
        ("megatron-core", "0.19.0"),
        ("megatron-core", "0.19.2"),
        ("megatron-core", "0.19.3rc0"),
        ("megatron-core", "0.19.2+5ab1"),
        ("megatron-bridge", "0.6.2"),
    ],
)
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    install(monkeypatch, {package: version})
    versions.require(package)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.12.1"),
        ("torch", "2.14.0"),
        ("megatron-core", "0.18.9"),
        ("megatron-core", "0.20.0"),
        ("megatron-core", "1.0"),
        ("megatron-bridge", "0.5.0"),
        ("megatron-bridge", "0.7.0"),
    ],
)
def test_other_versions_are_named_with_those_that_work(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    install(monkeypatch, {package: version})
    with pytest.raises(UnsupportedVersionError) as caught:
        versions.require(package)
    assert caught.value.found == f"{package} {version}"
    assert caught.value.expected == f"{package}{versions.SUPPORTED[package]}"
    assert f"pip install '{package}{versions.SUPPORTED[package]}'" in caught.value.remedy


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"torch": "2.13.0"})
    versions.require("torch")
    with pytest.raises(UnsupportedVersionError, match="no megatron-core installed"):
        versions.require("torch", "megatron-core")


def test_all_of_several_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"torch": "2.13.0", "megatron-core": "0.19.2", "megatron-bridge": "0.7.0"})
    with pytest.raises(UnsupportedVersionError, match="megatron-bridge"):
        versions.require("torch", "megatron-core", "megatron-bridge")


def test_the_distribution_asks_for_the_same_versions() -> None:
    from importlib.metadata import requires

    try:
        wanted = [Requirement(line) for line in requires("mbridge-fsdp-ckpt") or []]
    except PackageNotFoundError:
        pytest.skip("the package runs from its source tree")
    asked = {requirement.name: requirement.specifier for requirement in wanted}
    for package, specifier in versions.SUPPORTED.items():
        assert asked[package] == Requirement(f"{package}{specifier}").specifier

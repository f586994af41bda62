# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Whatever is touched of other packages is looked up first; an error says what is not there, and who needs it."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.serialization
from packaging.requirements import Requirement

import mbridge_fsdp_ckpt
from mbridge_fsdp_ckpt import versions
from mbridge_fsdp_ckpt.attributes import ATTRIBUTES
from mbridge_fsdp_ckpt.errors import UnsupportedVersionError
from mbridge_fsdp_ckpt.probes import PROBES, Need, Probe
from testing.modules import is_installed
from tests.patched import errors_without_each_name, unnamed

PACKAGE = Path(mbridge_fsdp_ckpt.__file__).parent
ALL = [probe for probes in PROBES.values() for probe in probes]
OF_OBJECTS = [Probe(file, subject, names) for subject, files in ATTRIBUTES.items() for file, names in files.items()]
UPSTREAM = ("megatron", "transformer_engine", "verl")


@pytest.fixture(autouse=True)
def asked_for_the_first_time() -> Iterator[None]:
    versions.forget()
    yield
    versions.forget()


def install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        found = installed.get(name.replace("-", "_"))
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(versions, "version", version)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package says; others warn, too, while they are imported."""
    return [record.getMessage() for record in caplog.records if record.name == versions.__name__]


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.11.0a0+nv25.11", "2.13.0", "2.15.0", "2.13.1+cu130"])
@pytest.mark.parametrize("core_version", ["0.18.0", "0.18.2", "0.19.0", "0.19.2", "0.19.3rc0", "0.19.2+5ab1"])
def test_versions_in_the_window_pass_without_a_word(
    torch_version: str, core_version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, torch=torch_version, megatron_core=core_version)
    with caplog.at_level(logging.WARNING):
        versions.require("save and load", "Megatron-FSDP")
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"torch": "2.10.1", "megatron_core": "0.19.2"}, "torch 2.10.1 is outside"),
        ({"torch": "2.16.0", "megatron_core": "0.19.2"}, "torch 2.16.0 is outside"),
        ({"torch": "2.13.0", "megatron_core": "0.17.1"}, "megatron-core 0.17.1 is outside"),
        ({"torch": "2.13.0", "megatron_core": "0.20.0"}, "megatron-core 0.20.0 is outside"),
        ({"torch": "2.13.0"}, "megatron-core of unknown version (not installed by pip) is outside"),
    ],
)
def test_other_versions_go_on_and_say_so_once(
    installed: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, **installed)
    for _ in range(2):
        versions.require("Megatron-FSDP")
        versions.require("plain models", "save and load", "Megatron-FSDP")
    (message,) = said(caplog)
    assert says in message
    assert re.search(r"\(>=[\d.]+,<[\d.]+\)", message)


def test_one_rank_says_it_for_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, torch="3.0", megatron_core="1.0")
    monkeypatch.setenv("RANK", "3")
    versions.require("save and load")
    assert said(caplog) == []


def test_a_name_that_is_gone_is_an_error_that_says_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", megatron_core="0.19.2")
    monkeypatch.delattr(torch.serialization, "set_crc32_options")
    with pytest.raises(UnsupportedVersionError) as caught:
        versions.require("save and load")
    assert caught.value.expected == "torch.serialization.set_crc32_options, which format/payload.py needs"
    assert caught.value.found == "torch 2.13.0 without it"
    assert f"a tested version (pip install 'torch{versions.TESTED['torch']}')" in caught.value.remedy
    with pytest.raises(UnsupportedVersionError):
        versions.require("save and load")


def test_a_function_that_takes_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import DTensor

    monkeypatch.setattr(DTensor, "from_local", lambda device_mesh, placements, shape: 0)
    with pytest.raises(UnsupportedVersionError, match=r"DTensor.from_local with stride, which live/optimizer/base.py"):
        versions.require("save and load")
    monkeypatch.setattr(DTensor, "from_local", lambda **anything: 0)
    versions.require("save and load")


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {
        "save and load": (Probe("live/readers/megatron_fsdp/parallel.py", "megatron.core.no_such_module", "anything"),)
    }
    monkeypatch.setattr(versions, "PROBES", gone)
    with pytest.raises(UnsupportedVersionError, match=r"without it: No module named 'megatron.core.no_such_module'"):
        versions.require("save and load")


def shaped(paths: list[str]) -> SimpleNamespace:
    """An object with these dotted attributes and no others."""
    heads: dict[str, list[str]] = {}
    for path in paths:
        head, _, rest = path.partition(".")
        heads.setdefault(head, []).extend([rest] if rest else [])
    return SimpleNamespace(**{head: shaped(rests) if rests else None for head, rests in heads.items()})


@pytest.mark.parametrize("subject", ATTRIBUTES)
def test_an_object_is_asked_for_each_of_its_attributes(subject: str) -> None:
    owners = {path: file for file, names in ATTRIBUTES[subject].items() for path in names.split()}
    versions.probe(subject, shaped(list(owners)))
    for gone, file in owners.items():
        with pytest.raises(UnsupportedVersionError) as caught:
            versions.probe(subject, shaped([path for path in owners if path != gone]))
        assert caught.value.expected == f"{gone} of {subject}, which {file} needs"


@pytest.mark.parametrize("need", PROBES)
def test_what_is_installed_here_has_every_name_and_each_is_missed(need: Need) -> None:
    missing = [probe.module for probe in PROBES[need] if not is_installed(probe.module.split(".")[0])]
    if missing or (need not in ("save and load", "DTensors") and not is_installed("transformer_engine")):
        pytest.skip("needs the whole stack, of which a part is not installed")
    versions.require(need)
    errors = errors_without_each_name((need,), lambda: versions.require(need))
    assert len(errors) > 0
    assert unnamed(errors) == []


@pytest.mark.parametrize("known", [*ALL, *OF_OBJECTS], ids=lambda known: known.file)
def test_the_file_that_a_probe_names_uses_each_name(known: Probe) -> None:
    source = (PACKAGE / known.file).read_text()
    for name in known.names.split():
        path, parameters = versions.parse(name)
        for word in (path.rpartition(".")[2], *parameters):
            assert re.search(rf"\b{re.escape(word)}\b", source), f"{known.file} does not use {word}"


def imported() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of what is imported from trainers; test support and recipes run the trainers themselves."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name.startswith(("testing/", "recipes/")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
                yield from ((name, node.module or "", alias.name) for alias in node.names)


def test_whatever_is_imported_from_a_trainer_is_looked_up() -> None:
    known = {f"{probe.module}.{versions.parse(name)[0]}" for probe in ALL for name in probe.names.split()}
    modules = {probe.module for probe in ALL}
    unknown = [
        (file, f"{module}.{name}")
        for file, module, name in imported()
        if f"{module}.{name}" not in modules and not any(f"{one}.".startswith(f"{module}.{name}.") for one in known)
    ]
    assert unknown == []


def test_the_distribution_asks_for_the_same_versions() -> None:
    wanted = [Requirement(line) for line in requires("mbridge-fsdp-ckpt") or []]
    asked = {requirement.name: str(requirement.specifier) for requirement in wanted}
    lowest = {package: window.partition(",")[0] for package, window in versions.TESTED.items()}
    assert {package: asked[package] for package in lowest} == lowest

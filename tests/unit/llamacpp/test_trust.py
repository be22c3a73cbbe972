"""Which libraries serve without `--untested`: the tested files, and what a recipe installed."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp import adapter, recipes
from superfluid_adapter_llamacpp.recipes import Recipe, altered, by_recipe, finish, here
from superfluid_workerd.adapter import Archive, InstallPlan, Probe
from superfluid_workerd.registry import checked_options
from support.llama_libraries import INSTALLED, library

OTHER = b"\0another digest"
"""What may stand behind the last section of a library, and changes nothing of what it does."""


def nobodys(path: Path) -> Path:
    """A library that works and that no digest knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(library(INSTALLED).read_bytes() + OTHER)
    return path


def checked(installed: Path, shared: Path) -> Probe:
    llama = adapter()
    llama.installed = installed
    return llama.check(checked_options(llama, {}), shared)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """What a recipe pins, for this test: an archive of a library that no digest knows."""
    source = nobodys(tmp_path / "source" / "libllama.so")
    with zipfile.ZipFile(tmp_path / "b1.zip", "w") as archive:
        archive.write(source, "build/libllama.so")
    content = (tmp_path / "b1.zip").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    pinned = Archive(url="https://example.invalid/b1.zip", size=len(content), sha256=sha256)
    monkeypatch.setattr(recipes, "RECIPES", (Recipe("b1", 7, "cpu", here(), (pinned,)),))
    return pinned


@pytest.fixture
def staged(given: Archive, tmp_path: Path) -> Callable[[InstallPlan], Path]:
    """The archive as the installer lays it down, finished by a plan."""

    def staged(plan: InstallPlan) -> Path:
        folder = tmp_path / "install"
        with zipfile.ZipFile(tmp_path / "b1.zip") as archive:
            archive.extractall(folder)
        finish(plan, folder)
        return folder

    return staged


@pytest.mark.parametrize("backend", ["cpu", "local"])
def test_what_a_recipe_pins_is_trusted_wherever_its_archive_came_from(
    backend: str, given: Archive, staged: Callable[[InstallPlan], Path], shared: Path
) -> None:
    own = Archive(url="/home/of/b1.zip", size=given.size, sha256=given.sha256)
    for artifact in (given, own):
        found = staged(InstallPlan(version="b1", backend=backend, artifacts=(artifact,)))
        probe = checked(found, shared)
        assert (probe.problem, probe.tested, probe.fix) == (None, True, "")
        shutil.rmtree(found)


def test_no_word_makes_a_library_trusted(
    given: Archive, staged: Callable[[InstallPlan], Path], shared: Path
) -> None:
    """Neither a backend, a version or a file's name of a recipe, nor a record that came along."""
    other = Archive(url=given.url, size=given.size, sha256="0" * 64)
    for artifacts in ((), (other,), (given, other)):
        found = staged(InstallPlan(version="b1", backend="cpu", artifacts=(given,)))
        finish(InstallPlan(version="b1", backend="cpu", artifacts=artifacts), found)
        assert not by_recipe(found)
        probe = checked(found, shared)
        assert (probe.problem, probe.tested) == (None, False)
        shutil.rmtree(found)


@pytest.mark.parametrize("what", ["changed", "added"])
def test_an_install_is_trusted_as_long_as_its_files_are_those_that_were_installed(
    what: str,
    given: Archive,
    staged: Callable[[InstallPlan], Path],
    shared: Path,
) -> None:
    found = staged(InstallPlan(version="b1", backend="cpu", artifacts=(given,)))
    own = found / "build" / "libllama.so"
    if what == "changed":
        content = own.read_bytes()
        own.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        shutil.copy(own, found / "build" / "libggml-other.so")
    probe = checked(found, shared)
    assert (probe.problem, probe.tested) == (None, False)
    name = "build/libggml-other.so" if what == "added" else "build/libllama.so"
    assert probe.fix.startswith(
        f"{name} is not what was installed: run superfluid runtime repair llamacpp install"
    )


def test_files_of_the_system_are_nobodys_to_vouch_for(
    given: Archive, staged: Callable[[InstallPlan], Path]
) -> None:
    found = staged(InstallPlan(version="b1", backend="cpu", artifacts=(given,)))
    assert altered(found, [str(found / "build" / "libllama.so"), "/proc/self/exe"]) is None


def test_a_tested_file_is_trusted_in_any_install(tmp_path: Path, shared: Path) -> None:
    found = tmp_path / "install"
    found.mkdir()
    shutil.copy(library(INSTALLED), found / "libllama.so")
    finish(InstallPlan(version="mine", backend="local"), found)
    assert checked(found, shared).tested

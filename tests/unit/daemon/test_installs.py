"""Installs on disk: which one is in use, and that nothing on the way loses one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.installs.installer import named_as
from superfluid.installs.store import (
    Install,
    Installs,
    Manifest,
    files_below,
    is_name,
    seal,
)
from superfluid_compat.errors import InstallFailed, InstallInUse, UnknownInstall
from superfluid_workerd.link.answers import InstallPlan

Put = Callable[..., Install]


@pytest.fixture
def kept(tmp_path: Path) -> Installs:
    return Installs(tmp_path / "runtimes")


@pytest.fixture
def put(kept: Installs) -> Put:
    """An install of this version, whose one file says `text`."""

    def put(version: str, text: str = "whole", backend: str = "cpu") -> Install:
        staging = kept.staging("engine")
        staged = staging / "install"
        staged.mkdir()
        (staged / "lib").write_text(text)
        seal(staged)
        plan = InstallPlan(version=version, backend=backend)
        manifest = Manifest(
            runtime="engine", name=f"{version}-{backend}", version=version, backend=backend,
            source="recipe", plan=plan, installed=1, adapter="1", files=files_below(staged),
        )  # fmt: skip
        return kept.place(staged, manifest, staging)

    return put


def used(kept: Installs) -> str | None:
    found = kept.in_use("engine")
    return found.name if found else None


def test_the_newest_is_used_until_another_is_put_to_use(kept: Installs, put: Put) -> None:
    assert used(kept) is None
    old = put("1.9")
    put("1.10")
    put("1.10", backend="gpu")
    put("odd version".replace(" ", "-"))
    names = [each.name for each in kept.all("engine")]
    assert names == ["1.10-gpu", "1.10-cpu", "1.9-cpu", "odd-version-cpu"]
    assert used(kept) == "1.10-gpu"
    kept.put_to_use(old)
    assert used(kept) == "1.9-cpu"
    before = kept.earlier("engine")
    assert before is not None
    assert before.name == "1.10-gpu"
    kept.step_back("engine", before)
    assert used(kept) == "1.10-gpu"


def test_a_pin_stays_whatever_is_put_to_use(kept: Installs, put: Put) -> None:
    first, second = put("1"), put("2")
    kept.put_to_use(first)
    kept.pin(first)
    kept.put_to_use(second)
    assert used(kept) == "1-cpu"
    kept.unpin("engine")
    assert used(kept) == "2-cpu"
    kept.pin(first)
    kept.remove(first)
    assert (used(kept), kept.pinned("engine")) == ("2-cpu", None)


@pytest.mark.parametrize("text", ["../../etc\n", "gone\n", "\0\xff", "", "1-cpu\n" * 3])
def test_what_stands_in_current_and_pinned_is_only_believed_of_what_is_here(
    kept: Installs, put: Put, text: str
) -> None:
    put("1")
    for name in ("current", "pinned"):
        (kept.root / "engine" / name).write_text(text, "latin-1")
    assert used(kept) == "1-cpu"


def test_one_is_named_by_its_version_when_that_says_it(kept: Installs, put: Put) -> None:
    put("1")
    put("2")
    put("2", backend="gpu")
    assert kept.get("engine", "1").name == "1-cpu"
    with pytest.raises(UnknownInstall, match="here are 2-gpu, 2-cpu, 1-cpu"):
        kept.get("engine", "2")
    with pytest.raises(UnknownInstall) as caught:
        kept.get("engine", "1-cpx")
    assert caught.value.fix == "did you mean 1-cpu?"


def test_a_rename_that_fails_leaves_what_stood(
    kept: Installs, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = put("1", "old").folder
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if self.name == "install":
            raise OSError("no")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="no"):
        put("1", "new")
    monkeypatch.undo()
    assert (place / "lib").read_text() == "old"
    put("1", "new")
    assert (place / "lib").read_text() == "new"


def test_an_install_set_aside_by_a_killed_attempt_is_put_back(kept: Installs, put: Put) -> None:
    place = put("1", "old").folder
    aside = kept.staging("engine") / "aside"
    aside.mkdir()
    place.rename(aside / place.name)
    assert kept.all("engine") == []
    kept.staging("engine")
    assert (place / "lib").read_text() == "old"


def test_damage_is_found_by_reading_and_loss_without(kept: Installs, put: Put) -> None:
    install = put("1")
    assert (install.missing(), install.damaged()) == (None, None)
    file = install.folder / "lib"
    file.write_text("whale")
    assert install.missing() is None
    assert install.damaged() == "lib has other content than was installed"
    file.write_text("longer than it was")
    assert install.missing() == "lib is not what was installed"
    file.unlink()
    assert install.missing() == "lib is gone"
    (install.folder / "install.json").write_text("{")
    (found,) = kept.all("engine")
    assert found.missing() == "install.json does not read"


def test_what_a_server_runs_is_not_removed(kept: Installs, put: Put) -> None:
    install = put("1")
    with kept.held(install), pytest.raises(InstallInUse, match="in use by a server"):
        kept.remove(install)
    kept.remove(install)
    assert kept.all("engine") == []
    assert not (kept.root / "engine" / ".staging").exists()


@pytest.mark.parametrize(
    ("name", "fits"),
    [("1.2-cpu", True), ("b11549-cuda-12.8", True), ("1+local", True), ("current", False),
     ("pinned", False), (".staging", False), ("a/b", False), ("..", False), ("", False),
     ("a\n", False), ("x" * 129, False)],
)  # fmt: skip
def test_an_installs_name_is_one_plain_word(name: str, fits: bool) -> None:
    assert is_name(name) is fits


@pytest.mark.parametrize(
    ("source", "text", "told"),
    [
        (None, "{staged}/bin/libllama.so dies", "bin/libllama.so dies"),
        (None, "no libllama lies in {staged}", "no libllama lies in the install"),
        ("build", "{staged}/build/libllama.so dies", "{source}/build/libllama.so dies"),
        ("libllama.so", "{staged}/libllama.so dies", "{source} dies"),
        ("some.whl", "{staged}/x/libllama.so dies", "{source}/x/libllama.so dies"),
    ],
)
def test_what_is_wrong_is_told_of_what_the_user_knows(
    source: str | None, text: str, told: str, tmp_path: Path
) -> None:
    staged = tmp_path / ".staging" / "install"
    staged.mkdir(parents=True)
    given = None
    if source is not None:
        given = str(tmp_path / source)
        Path(given).mkdir() if source == "build" else Path(given).touch()
    wanted = told.format(source=given)
    with pytest.raises(InstallFailed) as failed, named_as(given, staged):
        raise InstallFailed(text.format(staged=staged))
    assert failed.value.message == wanted
    assert ".staging" not in failed.value.line()

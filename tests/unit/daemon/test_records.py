"""Dossiers, the server's name, and stamps of what was prepared."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from superfluid.catalog import prepared
from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.entries import Entry
from superfluid.catalog.prepared import Preparations
from superfluid.catalog.workerd import HERE, Place
from superfluid.supervisor import name
from superfluid.supervisor.dossiers import Dossier, Dossiers, new_id, now
from superfluid_compat.errors import BadConfig, NameInUse, RuntimeBroken
from superfluid_workerd.link.answers import Facts, Probe


def dossier(identity: str) -> Dossier:
    return Dossier(
        id=identity,
        time=now(),
        model="m",
        runtime="fake",
        pid=7,
        stage="serving",
        reason="killed by SIGKILL (Killed)",
        exit="killed by SIGKILL (Killed)",
        code=-9,
        uptime_s=1.5,
        peak_rss_bytes=1 << 20,
        options={"lanes": {"value": 4, "origin": "default"}},
        stderr=["last words"],
    )


def test_a_dossier_is_private_json_and_found_by_its_id(tmp_path: Path) -> None:
    kept = Dossiers(tmp_path / "dossiers")
    first, second = dossier(new_id()), dossier(new_id())
    kept.write(first)
    kept.write(second)
    assert kept.find(first.id) == first
    assert kept.find("last") == second
    assert kept.find("none") is None
    for path in (tmp_path / "dossiers").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["stderr"] == ["last words"]
    assert (tmp_path / "dossiers").stat().st_mode & 0o777 == 0o700


def test_only_the_newest_dossiers_stay_whatever_the_wall_clock_says(tmp_path: Path) -> None:
    kept = Dossiers(tmp_path, most=3)
    written = [dossier(f"{number:08x}") for number in range(8)]
    for number, each in enumerate(written):
        kept.write(each)
        (path,) = tmp_path.glob(f"*-{each.id}.json")
        later = (1 << 33) - number
        os.utime(path, (later, later))
    kept.write(dossier("ffffffff"))
    assert sorted(path.stem[-8:] for path in tmp_path.iterdir()) == [
        "00000006",
        "00000007",
        "ffffffff",
    ]
    assert kept.find("last") == dossier("ffffffff")


def test_a_folder_that_takes_no_dossier_costs_the_dossier_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Dossiers(tmp_path / "file").write(dossier("1"))
    assert "could not be kept" in caplog.text


def test_a_dossier_that_finds_no_room_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        Dossiers(tmp_path).write(dossier("1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "could not be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_held_by_one_server_at_a_time(tmp_path: Path) -> None:
    with (
        name.held(tmp_path / "a"),
        name.held(tmp_path / "b"),
        pytest.raises(NameInUse, match="called a runs"),
        name.held(tmp_path / "a"),
    ):
        pass
    with name.held(tmp_path / "a"):
        pass


class Asked(Catalog):
    """A catalog that notes what it is asked and answers at once, or as told."""

    def __init__(self) -> None:
        super().__init__(found=[])
        self.asked: list[str] = []
        self.problem: str | None = None
        self.gate: asyncio.Event | None = None

    async def facts(
        self,
        adapter: str,
        model: Path,
        place: Place = HERE,
        *,
        options: Mapping[str, Any] | None = None,
        shared: Path | None = None,
        readable: Sequence[Path] = (),
    ) -> Facts:
        self.asked.append("facts")
        if self.gate:
            await self.gate.wait()
        return Facts(format="f", architecture="a")

    async def check(
        self, adapter: str, options: Mapping[str, Any], shared: Path, place: Place = HERE
    ) -> Probe:
        self.asked.append("check")
        if self.gate:
            await self.gate.wait()
        return Probe(version="1", problem=self.problem)

    async def prepare(
        self,
        adapter: str,
        facts: Facts,
        options: Mapping[str, Any],
        shared: Path,
        place: Place = HERE,
    ) -> None:
        assert shared.is_dir()
        self.asked.append("prepare")


ROW = Row(Entry("a", "superfluid", "1", "superfluid_compat"), None)
ALL = ["check", "facts", "prepare"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    return path


async def test_a_warm_start_asks_nothing_and_a_changed_one_asks_again(
    tmp_path: Path, model: Path
) -> None:
    said: list[str] = []
    preparations = Preparations(tmp_path / "cache")

    async def asked(options: Mapping[str, Any]) -> list[str]:
        catalog = Asked()
        await preparations.ensure(catalog, ROW, model, options, said.append)
        return catalog.asked

    assert await asked({"x": 1}) == ALL
    assert await asked({"x": 1}) == []
    assert await asked({"x": 2}) == ALL
    model.write_bytes(b"another")
    assert await asked({"x": 1}) == ["facts", "prepare"]
    assert await asked({"x": 1}) == []
    preparations.shared("a").rename(tmp_path / "aside")
    assert await asked({"x": 1}) == ALL
    assert said == []


async def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "prepared" / "a.lock").mkdir(parents=True)
    with pytest.raises(BadConfig, match="cannot be written"):
        await Preparations(cache).ensure(Asked(), ROW, model, {}, print)
    (cache / "lock").mkdir()
    with pytest.raises(BadConfig, match="cannot be written"), name.held(cache):
        pass


async def test_what_failed_is_asked_again(tmp_path: Path, model: Path) -> None:
    catalog, preparations = Asked(), Preparations(tmp_path / "cache")
    catalog.problem = "no"
    with pytest.raises(RuntimeBroken, match="runtime a: no"):
        await preparations.ensure(catalog, ROW, model, {}, print)
    catalog.problem = None
    await preparations.ensure(catalog, ROW, model, {}, print)
    assert catalog.asked == ["check", "check", "facts", "prepare"]


async def test_a_check_is_promised_to_be_the_last_only_if_it_finds_that_all_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "QUIET_S", 0.0)
    catalog, preparations = Asked(), Preparations(tmp_path / "cache")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if catalog.gate:
            catalog.gate.set()

    for problem in ("no", "no", None, None):
        catalog.problem, catalog.gate = problem, asyncio.Event()
        await preparations.probe(catalog, ROW, {}, say=say)
    assert said == ["checking the a runtime on this machine; once it works, not again"] * 3


async def test_what_takes_long_is_said_and_two_servers_do_it_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "QUIET_S", 0.0)
    catalog, preparations = Asked(), Preparations(tmp_path / "cache")
    catalog.gate = asyncio.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2 and catalog.gate:
            catalog.gate.set()

    await asyncio.gather(*(preparations.ensure(catalog, ROW, model, {}, say) for _ in range(2)))
    assert catalog.asked == ALL
    assert said == ["preparing the a runtime for this model, which happens once"] * 2

"""Which runtime serves a model: by name, by format among those ready, by memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from superfluid.catalog.catalog import Catalog
from superfluid.catalog.documents import compat_document, serves_document
from superfluid.catalog.entries import Entry
from superfluid.catalog.prepared import Preparations
from superfluid.catalog.standing import Choice, Chooser, Wanted
from superfluid.catalog.workerd import Workerd
from superfluid.installs.store import Installs
from superfluid_compat.errors import (
    BadOptionValue,
    DoesNotFit,
    ExitCode,
    ForeignOption,
    RuntimeBroken,
    RuntimeNotInstalled,
    RuntimeUntested,
    SuperfluidError,
    UnknownInstall,
    UnsupportedArchitecture,
    UsageError,
)
from superfluid_compat.verdicts import State
from superfluid_workerd.link.answers import GGUF, About, AdapterInfo, Facts, Probe
from superfluid_workerd.options import Kind, Option

WORKER = """
import json, sys
id_, words = sys.argv[3], sys.argv[4:]
answers = json.load(open(__file__ + ".json"))[id_]
with open(__file__ + ".asked", "a") as asked:
    print(id_, words[0], file=asked)
answer = answers.get(words[0], {})
print(json.dumps(answer))
sys.exit(3 if "code" in answer else 0)
"""
OPTION = Option("depth", Kind.INTEGER, "for tests", 1, minimum=1, maximum=9)


def about(id_: str, **fields: Any) -> About:
    info = AdapterInfo(id=id_, summary="", formats=(GGUF,), kit=1, **fields)
    return About(info=info, options=(OPTION.describe(),))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


class House:
    """Stub adapters: what each answers, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.answers: dict[str, dict[str, Any]] = {}
        self.said: list[str] = []

    def add(
        self,
        id_: str,
        *,
        probe: Probe | None = None,
        facts: Facts | Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        given = Facts(format="gguf", architecture="a", bytes=1000) if facts is None else facts
        self.answers[id_] = {
            "about": msgspec.to_builtins(about(id_, **fields)),
            "check": msgspec.to_builtins(probe or Probe(version="1")),
            "facts": msgspec.to_builtins(given),
        }

    def chooser(self, **given: Any) -> Chooser:
        Path(f"{self.script}.json").write_text(json.dumps(self.answers))
        catalog = Catalog(
            Workerd((sys.executable, "-S", str(self.script))),
            [Entry(id_, f"dist-{id_}", "1", "") for id_ in sorted(self.answers)],
        )
        made = Chooser(
            catalog,
            Installs(self.folder / "runtimes"),
            Preparations(self.folder / "cache"),
            say=self.said.append,
        )
        return replace(made, **given)

    def asked(self) -> list[str]:
        return Path(f"{self.script}.asked").read_text().splitlines()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def served(chooser: Chooser, model: Path, runtime: str | None = None) -> str:
    return (await chooser.choose(model, Wanted.parse(runtime))).standing.row.id


async def test_a_dedicated_engine_comes_before_one_that_streams_then_by_id(
    house: House, model: Path
) -> None:
    house.add("a", streams=True)
    house.add("c")
    house.add("b")
    chooser = house.chooser(budget=10_000)
    assert await served(chooser, model) == "b"
    assert await served(chooser, model, "c") == "c"
    rows = await chooser.catalog.candidates(model)
    assert [row.id for row in rows] == ["b", "c", "a"]


async def test_what_does_not_fit_goes_to_the_one_that_streams_and_says_so(
    house: House, model: Path
) -> None:
    house.add("engine")
    house.add("stream", streams=True)
    assert await served(house.chooser(budget=1000), model) == "engine"
    assert house.said == []
    assert await served(house.chooser(budget=999), model) == "stream"
    assert house.said == [
        "its weights take 0.977 KiB, 999 B of memory are there: served by stream, which streams "
        "them, in place of engine"
    ]
    assert await served(house.chooser(budget=999), model, "engine") == "engine"
    assert house.asked().count("engine facts") == 1


async def test_what_fits_by_its_weights_alone_goes_to_the_one_that_streams(
    house: House, model: Path
) -> None:
    house.add("engine")
    house.add("stream", streams=True)
    asked: list[str] = []

    async def plan(choice: Choice) -> None:
        asked.append(choice.standing.row.id)
        raise DoesNotFit("it needs 465M, 400M are there")

    chooser = replace(house.chooser(budget=10_000), plan=plan)
    assert await served(chooser, model) == "stream"
    assert asked == ["engine"]
    assert "it needs 465M" in house.said[0]


async def test_a_header_that_one_refuses_goes_to_the_next(house: House, model: Path) -> None:
    refusal = {"code": "unsupported_architecture", "message": "no mamba"}
    house.add("engine", facts=refusal)
    house.add("stream", streams=True)
    assert await served(house.chooser(), model) == "stream"
    assert house.said == ["engine does not serve m.gguf: no mamba"]
    house.add("stream", streams=True, facts=refusal)
    model.write_bytes(b"GGUF, another one")
    with pytest.raises(UnsupportedArchitecture, match="no mamba"):
        await served(house.chooser(), model)
    document = await serves_document(house.chooser(), model, Wanted())
    assert (document.runtime, document.exit_code) == (None, 3)
    assert [each.code for each in document.candidates] == ["unsupported_architecture"] * 2


async def test_only_what_is_ready_serves(house: House, model: Path) -> None:
    house.add("engine", bundled=False)
    house.add("odd", probe=Probe(version="9", tested=False))
    house.add("stream", probe=Probe(version="1", problem="no", rule="r", state=State.BROKEN))
    with pytest.raises(RuntimeNotInstalled) as caught:
        await served(house.chooser(), model)
    assert caught.value.fix == "run superfluid runtime install engine"
    assert "odd is untested" in caught.value.message
    assert "stream is broken" in caught.value.message
    assert await served(house.chooser(untested=True), model) == "odd"
    with pytest.raises(RuntimeUntested, match="9"):
        await served(house.chooser(), model, "odd")
    with pytest.raises(UnknownInstall, match="no install 1"):
        await served(house.chooser(), model, "engine@1")


async def test_options_are_the_chosen_ones(house: House, model: Path) -> None:
    house.add("a")
    house.add("b")
    environment = {"b": (("environment", {"depth": "3"}),)}
    choice = await house.chooser(sources=environment).choose(model, Wanted())
    assert (choice.standing.row.id, choice.values) == ("a", {"depth": 1})
    with pytest.raises(ForeignOption, match="--b-depth is an option of runtime b"):
        await served(house.chooser(sources={"b": (("flag", {"depth": "3"}),)}), model)
    with pytest.raises(BadOptionValue, match="option a-depth was given 10"):
        await served(house.chooser(sources={"a": (("flag", {"depth": "10"}),)}), model)


async def test_a_check_that_failed_is_done_again_and_one_that_passed_is_not(
    house: House, model: Path
) -> None:
    house.add("a", probe=Probe(version="1", problem="no"))
    for _ in range(2):
        with pytest.raises(SuperfluidError):
            await served(house.chooser(), model)
    house.add("a")
    for _ in range(2):
        await served(house.chooser(), model)
    assert house.asked().count("a check") == 3


@pytest.mark.parametrize(("fix", "told"), [("", "reinstall dist-a"), ("plug it in", "plug it in")])
async def test_a_failed_check_says_what_mends_it(
    house: House, model: Path, fix: str, told: str
) -> None:
    house.add("a", probe=Probe(version="1", problem="no", fix=fix))
    with pytest.raises(RuntimeBroken) as caught:
        await served(house.chooser(), model)
    assert caught.value.fix == told


async def test_an_install_by_name_contradicts_a_runtime_of_the_users_own(
    house: House, model: Path
) -> None:
    house.add("a", bundled=False, own_option="depth")
    chooser = house.chooser(sources={"a": (("flag", {"depth": "3"}),)})
    with pytest.raises(
        UsageError, match="--runtime a@1-cpu names an install, --a-depth"
    ) as refused:
        await chooser.choose(model, Wanted("a", "1-cpu"))
    assert refused.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("kind", ["module", "package"])
async def test_an_adapter_whose_code_changed_is_checked_again(
    house: House, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"their_{kind}"
    code = house.folder / (f"{name}.py" if kind == "module" else f"{name}/__init__.py")
    code.parent.mkdir(exist_ok=True)
    code.write_text("")
    monkeypatch.syspath_prepend(str(house.folder))
    house.add("a")
    chooser = house.chooser()
    chooser.catalog.entries = (Entry("a", "dist-a", "1", name),)
    for changed_s in (1000, 1000, 2000):
        os.utime(code, (changed_s, changed_s))
        await served(chooser, model)
    assert house.asked().count("a check") == 2


async def test_each_adapter_is_asked_once_for_compat(house: House) -> None:
    house.add("a")
    house.add("b")
    document = await compat_document(house.chooser().catalog)
    assert sorted(document.runtimes) == ["a", "b"]
    assert sorted(house.asked()) == ["a about", "b about"]


@pytest.mark.parametrize(
    ("text", "model", "wanted"),
    [
        (None, "m", Wanted()),
        ("", "m", Wanted()),
        ("a", "m", Wanted("a")),
        ("a@1-cpu", "m", Wanted("a", "1-cpu")),
        ("a,m=b@2", "m", Wanted("b", "2")),
        ("m=b,a", "n", Wanted("a")),
        ("m=b", "n", Wanted()),
        ("org/x:q=b", "org/x:q", Wanted("b")),
    ],
)
def test_a_runtime_is_named_for_all_or_for_one_model(
    text: str | None, model: str, wanted: Wanted
) -> None:
    assert Wanted.parse(text, model) == wanted

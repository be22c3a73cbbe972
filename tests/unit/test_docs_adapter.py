"""The worked example of docs/adapters.md, taken from the page and run."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from superfluid.catalog import catalog
from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import WorkerState
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd import adapter
from superfluid_workerd.adapter import Feed
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    EmbeddingContract,
    RuntimeContract,
    TokenizerContract,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


def block(kind: str) -> str:
    """The page's one block of code of that kind."""
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(found) == 1
    return found[0]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's code as an installed package looks to Python."""
    (tmp_path / "superfluid_adapter_parrot.py").write_text(block("python"), "utf-8")
    info = tmp_path / "superfluid_adapter_parrot-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: superfluid-adapter-parrot\nVersion: 1.0.0\n")
    entry = re.search(r"^parrot = \"(.*)\"$", block("toml"), re.M)
    assert entry is not None
    (info / "entry_points.txt").write_text(f"[superfluid.adapters]\nparrot = {entry[1]}\n")
    return tmp_path


@pytest.fixture
def module(package: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "superfluid_adapter_parrot", raising=False)
    return importlib.import_module("superfluid_adapter_parrot")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "hello.parrot"
    path.write_bytes(b"PARROT\nhello again. \n")
    return path


@pytest.fixture
def case(module: ModuleType, model: Path, tmp_path: Path) -> Case:
    folder = tmp_path / "shared"
    folder.mkdir()
    return Case(adapter=module.adapter(), model=model, folder=folder)


class TestAdapter(AdapterContract):
    """The example keeps the contract that it explains."""


class TestRuntime(RuntimeContract):
    """So does its runtime."""


class TestTokenizer(TokenizerContract):
    """And its tokenizer."""


@pytest.fixture
def tally(case: Case, package: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The page's second example, beside the first."""
    (package / "superfluid_adapter_tally.py").write_text(block("python3"), "utf-8")
    monkeypatch.delitem(sys.modules, "superfluid_adapter_tally", raising=False)
    module = importlib.import_module("superfluid_adapter_tally")
    return replace(case, adapter=module.adapter())


class TestTally(EmbeddingContract):
    """The one that embeds keeps its own."""

    @pytest.fixture
    def case(self, tally: Case) -> Case:
        return tally


class TestTallyAdapter(AdapterContract):
    """And that of every adapter."""

    @pytest.fixture
    def case(self, tally: Case) -> Case:
        return tally


def ask(package: Path, *arguments: str, given: str = "") -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "superfluid_workerd", "parrot", *arguments],
        env={**os.environ, "PYTHONPATH": str(package)},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_the_worker_answers_for_it(package: Path, model: Path) -> None:
    code, info = ask(package, "info")
    assert (code, info["id"]) == (0, "parrot")
    code, facts = ask(package, "facts", str(model))
    assert (code, facts["name"], facts["bytes"]) == (0, "hello", 13)
    code, _ = ask(package, "check", "--shared", str(package))
    assert code == 0
    code, tokens = ask(package, "tokenize", str(model), given="hi")
    assert (code, tokens) == (0, [104, 105])


def test_a_file_that_is_no_model_of_its_is_refused(package: Path, model: Path) -> None:
    model.write_bytes(b"PARROT\n")
    code, refusal = ask(package, "facts", str(model))
    assert (code, refusal["code"]) == (3, "model_damaged")


def test_more_context_than_it_has_is_refused(case: Case) -> None:
    assert case.adapter.open(case.request(context=4096)).record.got["context"] == 4096
    with pytest.raises(DoesNotFit, match="a context of 4097 was asked for, a parrot has 4096"):
        case.adapter.open(case.request(context=4097))


def test_its_option_is_in_the_record(case: Case) -> None:
    record = replace(case, options={"certainty": 7}).load().record
    assert (record.asked["certainty"], record.got["certainty"]) == (7, 7)


LIMITS = {
    "`about`, `memory`, `plan`": catalog.ANSWER_S,
    "`facts`, and `vet` with it": catalog.READ_S,
    "`check`": catalog.CHECK_S,
    "`prepare`, `install`": catalog.PREPARE_S,
    "a worker's start, up to its greeting": Limits().still_s[WorkerState.SPAWNED],
    "`open`, before its first `progress`": Limits().still_s[WorkerState.PROBED],
    "`open`, after that": Limits().still_s[WorkerState.MAPPED],
    "a step": Limits().still_s[WorkerState.SERVING],
}


def test_the_page_tells_the_limits_there_are() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    assert {what: float(limit) for what, limit in rows} == LIMITS


def test_all_it_needs_comes_from_the_adapter_module_and_the_errors(module: ModuleType) -> None:
    tree = ast.parse(block("python"))
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in ours if name and name.startswith("superfluid")} == {
        "superfluid_compat.errors",
        "superfluid_workerd.adapter",
    }
    assert set(adapter.__all__) <= set(dir(adapter))


def test_it_says_its_phrase(case: Case) -> None:
    loaded = case.load()
    sequence = loaded.runtime.seq_create()
    said, token = b"", ord("h")
    for position in range(13):
        (rows,) = loaded.runtime.step([Feed(sequence, [token], position)], lambda: None)
        assert rows is not None
        token = int(rows[-1].argmax())
        said += loaded.tokenizer.piece(token)
    assert said == b"ello again. h"

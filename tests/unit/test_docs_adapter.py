"""The worked example of docs/adapters.md, taken from the page and run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from superfluid_workerd.adapter import Feed, OpenRequest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's code as an installed package looks to Python."""
    text = PAGE.read_text("utf-8")
    code, project = (
        re.search(rf"^```{kind}\n(.*?)^```", text, re.M | re.S) for kind in ("python", "toml")
    )
    assert code is not None
    assert project is not None
    (tmp_path / "superfluid_adapter_parrot.py").write_text(code[1], "utf-8")
    info = tmp_path / "superfluid_adapter_parrot-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: superfluid-adapter-parrot\nVersion: 1.0.0\n")
    entry = re.search(r"^parrot = \"(.*)\"$", project[1], re.M)
    assert entry is not None
    (info / "entry_points.txt").write_text(f"[superfluid.adapters]\nparrot = {entry[1]}\n")
    return tmp_path


@pytest.fixture
def module(package: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "superfluid_adapter_parrot", package / "superfluid_adapter_parrot.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "hello.parrot"
    path.write_bytes(b"PARROT\nhello again. ")
    return path


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


def test_it_says_its_phrase(module: ModuleType, model: Path, tmp_path: Path) -> None:
    adapter = module.adapter()
    options = {option.name: option.default for option in adapter.options()}
    request = OpenRequest(model, tmp_path, tmp_path, lanes=2, options=options)
    runtime = adapter.open(request).runtime
    sequence = runtime.seq_create()
    said, token = b"", ord("h")
    for position in range(13):
        (rows,) = runtime.step([Feed(sequence, [token], position)], lambda: None)
        token = int(rows[-1].argmax())
        said += adapter.tokenizer(model, options).piece(token)
    assert said == b"ello again. h"

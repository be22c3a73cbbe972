"""The evidence on a library is one document, comes in time, and holds what is to be added."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import superfluid_adapter_llamacpp
from superfluid_adapter_llamacpp.contracts import contracts, known
from superfluid_adapter_llamacpp.report import report
from support.llama_libraries import INSTALLED, library
from support.llama_standin import FAULT, build

SEVEN = contracts()[7]
DATA = Path(superfluid_adapter_llamacpp.__file__).with_name("contracts.json")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "superfluid_adapter_llamacpp.evidence", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(*words: object, code: int) -> dict[str, Any]:
    done = run(*words)
    assert (done.returncode, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_build_that_is_known_shows_its_row_as_it_is_written() -> None:
    done = run(library(INSTALLED))
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["contract"], found["nearest"], found["differences"]) == (7, 7, [])
    assert (found["known"]["build"], found["known"]["contract"]) == (INSTALLED, 7)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('  "known": '))
    row = line.removeprefix('  "known": ').removesuffix(",")
    assert f"\n    {row},\n" in DATA.read_text()


def test_a_new_build_of_a_known_contract_shows_the_row_to_add(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True)
    beside = build(tmp_path / "libggml-cpu.so", contract=SEVEN)
    found = document(path, "--build", "b12000", "--source", "a wheel 1.0", code=0)
    digests = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in (path, beside)}
    platform = next(one.platform for one in known().values() if one.build == INSTALLED)
    assert found["digests"] == digests
    assert list(found["known"].items()) == [
        ("build", "b12000"),
        ("source", "a wheel 1.0"),
        ("contract", 7),
        ("platform", platform),
        ("sha256", digests["libllama.so"]),
    ]


def test_a_contract_that_is_not_served_has_a_row_and_no_success() -> None:
    found = document(library("b8672"), code=4)
    assert (found["reason"], found["contract"], found["nearest"]) == ("number-differs", 1, 1)
    assert found["known"]["contract"] == 1


def test_a_layout_that_is_unknown_shows_all_that_differs_from_the_nearest(tmp_path: Path) -> None:
    path = build(
        tmp_path / "libllama.so",
        contract=SEVEN,
        context={"n_ubatch": 513, "yarn_beta_slow": 1},
        model={"split_mode": 2},
    )
    found = document(path, code=4)
    assert (found["reason"], found["nearest"], found["known"]) == ("unknown-abi", 7, None)
    assert found["differences"] == [
        "context defaults: n_ubatch reads 513, wanted 512",
        "context defaults: yarn_beta_slow reads 1, wanted -1",
        "model defaults: split_mode reads 2, wanted 1",
    ]


def test_a_library_that_fails_the_canary_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "decode")
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True)
    found = document(path, code=4)
    assert (found["reason"], found["contract"], found["known"]) == ("canary-failed", 7, None)


@pytest.mark.parametrize("kind", ["text", "nothing", "pipe", "folder"])
def test_what_is_no_library_is_a_document_too(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "libllama.so"
    match kind:
        case "text":
            path.write_text("no library\n")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            pass
    found = document(path, code=4)
    assert (found["reason"], found["known"], found["nearest"]) == ("cannot-load", None, None)
    assert found["sentence"].endswith("a shared library was wanted")


def test_a_library_that_hangs_is_a_document_in_time(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load="for (;;) pause();")
    judgement, found = report(path, limit_s=1.0)
    assert judgement.reason == found["reason"] == "cannot-load"
    assert f"{path} did not answer for 1 s" in found["sentence"]


def test_a_library_that_dies_is_a_document(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load="raise(SIGSEGV);")
    found = document(path, code=4)
    assert "died by SIGSEGV while it loaded" in found["sentence"]


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--what", "a"]])
def test_other_words_are_a_matter_of_usage(words: list[str]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert run("--help").returncode == 0


def test_rows_are_whole() -> None:
    for one in known().values():
        assert re.fullmatch(r"b\d+", one.build)
        assert re.fullmatch(r"[0-9a-f]{64}", one.sha256)
        assert re.fullmatch(r"(linux|darwin)-(x86_64|aarch64)", one.platform)
        assert one.source
        assert one.build in contracts()[one.contract].builds

"""Which llama.cpp serves without `--untested`, through the whole house."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from superfluid_compat.errors import ExitCode
from support.llama_libraries import INSTALLED, library
from support.server import Ended, run, serving
from support.tiny_models import TinyModel, write_model

NAME = f"{INSTALLED}-cpu"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", TinyModel())


def serve(model: Path, home: Path, *flags: str, **extra: str) -> Ended:
    """Of a `serve` that is expected to end by itself."""
    words = ["serve", str(model), "--port", "0", "--threads", "1", *flags]
    return run(words, home, 120.0, **extra)


def refused(ended: Ended, *words: str, code: ExitCode = ExitCode.RUNTIME) -> None:
    assert ended.code == code, ended
    (line,) = [line for line in ended.err.splitlines() if line.startswith("superfluid: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in ended.err


def row(home: Path) -> dict[str, Any]:
    rows = json.loads(run(["runtimes", "--json"], home, 120.0).out)["runtimes"]
    return next(it for it in rows if it["id"] == "llamacpp")


def unknown(path: Path) -> Path:
    """A library that works and that no digest knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(library(INSTALLED).read_bytes() + b"\0")
    return path


def test_an_install_with_another_byte_is_untested_until_it_is_repaired(
    model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    done = run(["runtime", "install", "llamacpp", "--version", INSTALLED], home, 300.0)
    assert done.code == 0, done
    with serving([str(model), "--runtime", "llamacpp", "--threads", "1"], home):
        pass
    (own,) = home.rglob("xllamacpp*.so")
    with own.open("r+b") as file:
        file.seek(-1, os.SEEK_END)  # in the table of sections, which no loader reads
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    ended = serve(model, home, "--runtime", f"llamacpp@{NAME}")
    refused(ended, "is not what was installed", f"superfluid runtime repair llamacpp {NAME}")
    assert (row(home)["state"], row(home)["rule"]) == ("untested", "build-untested")
    words = [str(model), "--runtime", "llamacpp", "--threads", "1", "--untested"]
    with serving(words, home):
        pass
    assert run(["runtime", "repair", "llamacpp"], home, 300.0).code == 0
    with serving([str(model), "--runtime", "llamacpp", "--threads", "1"], home):
        pass
    assert row(home)["state"] == "ready"


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_library_of_ones_own_is_untested_whatever_it_is_called(
    kind: str, model: Path, tmp_path: Path
) -> None:
    given = unknown(tmp_path / "mid" / "libllama.so").parent
    if kind == "archive":
        given = Path(shutil.make_archive(str(tmp_path / "mid"), "tar", given))
    home = tmp_path / "home"
    words = ["runtime", "install", "llamacpp", "--from", str(given)]
    for more in ([], ["--backend", "cpu"], ["--backend", "cpu", "--version", INSTALLED]):
        refused(run([*words, *more], home, 120.0), "which nobody tested", "--untested")
    assert run([*words, *more, "--untested"], home, 120.0).code == 0
    refused(serve(model, home, "--runtime", f"llamacpp@{NAME}"), "which nobody tested")

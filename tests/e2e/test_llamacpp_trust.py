"""Which llama.cpp serves without `--untested`, through the whole house."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

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


# A library that is named is the only one looked at, and what gave it is said.

NOWHERE: Final = "/no/such/libllama.so"
ENDLESS: Final = "/" + "x" * 300


@pytest.mark.parametrize("variable", ["SUPERFLUID_LLAMA_LIB", "SUPERFLUID_LLAMACPP_LIB"])
def test_the_variable_that_gave_a_library_is_the_one_that_is_named(
    variable: str, model: Path, tmp_path: Path
) -> None:
    by = f"it was given by {variable}"
    home, given = tmp_path / "home", {variable: NOWHERE}
    refused(serve(model, home, **given), "there is no such file", "and name no library", by)
    both = serve(model, home, "--runtime", f"llamacpp@{NAME}", **given)
    refused(both, "names an install", by, code=ExitCode.USAGE)
    both = serve(
        model, home, SUPERFLUID_LLAMA_LIB=str(library(INSTALLED)), SUPERFLUID_LLAMACPP_LIB=NOWHERE
    )
    refused(both, "it was given by SUPERFLUID_LLAMACPP_LIB")


@pytest.mark.parametrize("path", [NOWHERE, ENDLESS], ids=["nowhere", "endless"])
def test_a_library_that_is_nowhere_is_told_of_whoever_asks(
    path: str, model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for ended in (
        serve(model, home, "--llamacpp-lib", path),
        run(["tokenize", str(model)], home, SUPERFLUID_LLAMA_LIB=path),
    ):
        refused(ended, f"runtime llamacpp: {path}: ", "a shared library was wanted")
        assert ended.out == ""
    words = ["tokenize", str(model), "--runtime", "native"]
    assert run(words, home, SUPERFLUID_LLAMA_LIB=path).code == 0


def test_an_untested_library_tells_no_tokens_unless_it_may(model: Path, tmp_path: Path) -> None:
    home, own = tmp_path / "home", str(unknown(tmp_path / "libllama.so"))
    for more in ([], ["--runtime", "llamacpp"]):
        words = ["tokenize", str(model), *more]
        ended = run(words, home, SUPERFLUID_LLAMA_LIB=own)
        refused(ended, "which nobody tested", "--untested")
        told = run([*words, "--untested"], home, SUPERFLUID_LLAMA_LIB=own)
        by_variable = run(words, home, SUPERFLUID_LLAMA_LIB=own, SUPERFLUID_UNTESTED="true")
        assert (told.code, by_variable) == (0, told)

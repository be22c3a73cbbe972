"""What is given as a model and is none: each command says so in one line, at once, by its code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from superfluid_compat.errors import ExitCode
from support.llama_libraries import INSTALLED, library
from support.server import MORTAL, run
from support.tiny_models import TinyModel, write_model

LIB: Final = str(library(INSTALLED))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.mkdir()


def folder_of_pipes(path: Path) -> None:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        os.mkfifo(path / name)


def locked(path: Path) -> None:
    write_model(path, TinyModel()).chmod(0)


def text(path: Path) -> None:
    path.write_text("no model at all\n")


def cut(path: Path) -> None:
    """Within its vocabulary."""
    whole = write_model(path, TinyModel()).read_bytes()
    os.truncate(path, whole.index(b"tokenizer.ggml.tokens") + 200)


WHATS: Final[list[tuple[Callable[[Path], None], str]]] = [
    (pipe, "is neither a file nor a folder"),
    (device, "is neither a file nor a folder"),
    (dangling, "there is no file"),
    (folder, "is empty"),
    (folder_of_pipes, "regular file"),
    (locked, "cannot be read: permission denied"),
    (text, "which no runtime asked reads"),
    (cut, "cut.gguf: "),
]


READS_NO_FOLDERS: Final = [it for it in WHATS if it[0] is not folder_of_pipes]
TOKENIZED: Final = [
    *((make, words, ()) for make, words in WHATS),
    *((make, words, ("--runtime", "llamacpp")) for make, words in READS_NO_FOLDERS),
]


@pytest.mark.parametrize(
    ("make", "words", "runtime"), TOKENIZED, ids=lambda it: getattr(it, "__name__", "")
)
def test_tokenize_says_what_is_no_model(
    make: Callable[[Path], None], words: str, runtime: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"{make.__name__}.gguf"
    make(path)
    command = ["tokenize", str(path), *runtime]
    ended = run(command, tmp_path / "home", program=("-c", MORTAL), SUPERFLUID_LLAMA_LIB=LIB)
    assert (ended.code, ended.out) == (ExitCode.MODEL, ""), ended
    (line,) = ended.err.splitlines()
    assert line.startswith("superfluid: ")
    assert str(path) in line
    assert words in line


@pytest.mark.parametrize(("make", "words"), WHATS, ids=lambda it: getattr(it, "__name__", ""))
def test_serving_and_the_question_whether_say_what_is_no_model(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{make.__name__}.gguf"
    make(path)
    home, program = tmp_path / "home", ("-c", MORTAL)
    told = run(["runtimes", str(path)], home, program=program, SUPERFLUID_LLAMA_LIB=LIB)
    assert told.code in (ExitCode.MODEL, ExitCode.FAILURE), told
    served = run(
        ["serve", str(path), "--port", "0"], home, program=program, SUPERFLUID_LLAMA_LIB=LIB
    )
    assert served.code == ExitCode.MODEL, served
    (line,) = [it for it in served.err.splitlines() if it.startswith("superfluid: ")]
    assert words in line
    assert words in told.out + told.err
    assert "Traceback" not in served.err + told.err


def test_a_home_that_takes_nothing_still_answers_who_serves(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel())
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    told = run(["runtimes", str(path)], home, 120.0, ("-c", MORTAL), SUPERFLUID_LLAMA_LIB=LIB)
    assert told.code == 0, told
    assert "served by llamacpp" in told.out

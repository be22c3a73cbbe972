"""`superfluid tokenize` as it is called, against llama.cpp on the same vocabulary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from support import tiny_vocabularies
from support.gguf_writer import tensor, write_gguf, write_split
from support.llamacpp import LlamaCpp

TEXT = "the river <s> runs 世 🤗\n to"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary and nothing else."""
    keys = {"general.architecture": "llama", **tiny_vocabularies.spm()}
    return write_gguf(tmp_path_factory.mktemp("vocabulary") / "m.gguf", keys, [])


def tokenize(
    model: Path, *arguments: str, text: bytes = TEXT.encode()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "superfluid", "tokenize", str(model), *arguments]
    home = {**os.environ, "SUPERFLUID_HOME": str(model.parent / "home")}
    done = subprocess.run(command, input=text, capture_output=True, check=False, env=home)
    return subprocess.CompletedProcess(
        command, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_ids_are_llamacpps(model: Path) -> None:
    with LlamaCpp(model) as oracle:
        for flags, wanted in (
            ((), oracle.tokenize(TEXT)),
            (("--plain",), oracle.tokenize(TEXT, add_special=False)),
            (("--special",), oracle.tokenize(TEXT, parse_special=True)),
        ):
            assert list(map(int, tokenize(model, *flags).stdout.split())) == wanted


def test_json_is_a_list_of_ids(model: Path) -> None:
    listed = tokenize(model).stdout.split()
    assert json.loads(tokenize(model, "--json").stdout) == list(map(int, listed))


def test_pieces_join_to_the_text(model: Path) -> None:
    records = json.loads(tokenize(model, "--pieces", "--json", "--plain").stdout)
    assert b"".join(bytes(one["bytes"]) for one in records).decode().strip() == TEXT
    lines = tokenize(model, "--pieces", "--plain").stdout.splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == [one["id"] for one in records]
    assert json.loads(lines[0].split("\t")[1]) == records[0]["text"]


def test_nothing_gives_the_opening_token_alone(model: Path) -> None:
    assert tokenize(model, text=b"").stdout == "1\n"
    assert tokenize(model, "--plain", "--json", text=b"").stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "text", "code", "message"),
    [
        ((), b"\xff", 2, "no UTF-8"),
        (("--runtime", "nativ"), b"a", 2, "did you mean native?"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], text: bytes, code: int, message: str, model: Path
) -> None:
    done = tokenize(model, *arguments, text=text)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_text_without_end_is_refused(model: Path) -> None:
    command = f"yes hello | {sys.executable} -m superfluid tokenize {model}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input holds more than 1 MiB" in done.stderr


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = tokenize(tmp_path / "none.gguf")
    assert done.returncode == 3
    assert "none.gguf" in done.stderr


KEYS = {"general.architecture": "llama", **tiny_vocabularies.spm()}
IQ2_XXS = 16
MATRIX = replace(tensor("blk.0.ffn_up.weight", np.zeros((2, 256), np.float32)), ggml=IQ2_XXS)


def unknown_type(folder: Path) -> Path:
    return write_gguf(folder / "m.gguf", KEYS, [MATRIX])


def unknown_architecture(folder: Path) -> Path:
    return write_gguf(folder / "m.gguf", {**KEYS, "general.architecture": "rwkv9"}, [MATRIX])


def one_part_of_two(folder: Path) -> Path:
    parts = write_split(folder, "m", KEYS, [[MATRIX], []])
    parts[1].unlink()
    return parts[0]


def the_later_part(folder: Path) -> Path:
    return write_split(folder, "m", KEYS, [[MATRIX], []])[1]


def cut_behind_its_vocabulary(folder: Path) -> Path:
    path = write_gguf(folder / "m.gguf", KEYS, [MATRIX])
    os.truncate(path, path.stat().st_size - 2 * 256 * 4 - 8)
    return path


@pytest.mark.parametrize(
    "written",
    [unknown_type, unknown_architecture, one_part_of_two, the_later_part,
     cut_behind_its_vocabulary],
)  # fmt: skip
def test_a_vocabulary_serves_whatever_else_the_model_has(
    written: Callable[[Path], Path], model: Path, tmp_path: Path
) -> None:
    done = tokenize(written(tmp_path))
    assert (done.returncode, done.stdout) == (0, tokenize(model).stdout), done.stderr


def test_a_folder_of_an_unknown_architecture_has_its_tokenizer(tmp_path: Path) -> None:
    words = Engine(WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv9"}))
    (tmp_path / "model.safetensors").touch()
    done = tokenize(tmp_path, text=b"b a b")
    assert (done.returncode, done.stdout) == (0, "1 0 1\n"), done.stderr

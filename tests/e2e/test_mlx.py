"""The default model through mlx-lm, of both generations: installed, served, and as native says.

The same weights are served by both: the file's blocks decoded to F32, and natively by the `exact`
mode, which rounds no activation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from superfluid_workerd.adapter import Feed
from support.mlx_environments import GENERATIONS, HOME, answer, interpreter
from support.mlx_folder import write_folder
from support.native_models import ignore, opened
from support.parity import Logits, compare
from support.server import Server, run, serving

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

FIRST: Final = 64
POSITIONS: Final = 88
"""Compared are the positions from FIRST on. Windows that fill are compared on tiny models."""

MOST_KL: Final = 1e-4
TEXT: Final = Path(__file__).parents[2] / "LICENSE"
PROMPTS: Final = (
    "The Eiffel Tower is in the city of",
    "def fibonacci(n):\n",
    "Es war einmal ein",
    "1, 2, 3, 4, 5, 6, 7, 8,",
)
TOKENS: Final = 8


@pytest.fixture(scope="module")
def folder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(default_model, tmp_path_factory.mktemp("mlx") / "gemma")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own with the installs that every test shares."""
    for generation in GENERATIONS:
        interpreter(generation)
    made = tmp_path_factory.mktemp("home")
    (made / "data").mkdir()
    (made / "data" / "runtimes").symlink_to(HOME / "data" / "runtimes")
    return made


class Native:
    """The native runtime, exact, on the default model."""

    def __init__(self, loaded: Any) -> None:
        self.tokenizer, self.runtime = loaded.tokenizer, loaded.runtime

    def rows(self, ids: list[int], first: int) -> Logits:
        """Logits at the positions from `first` on."""
        sequence = self.runtime.seq_create()
        for start in range(0, first, 32):
            chunk = ids[start : min(start + 32, first)]
            self.runtime.step([Feed(sequence, chunk, start, "none")], ignore)
        found = []
        for start in range(first, len(ids), 16):
            feed = Feed(sequence, ids[start : start + 16], start, "all")
            found.extend(self.runtime.step([feed], ignore))
        self.runtime.seq_free(sequence)
        rows: Logits = np.concatenate(found)
        return rows


@pytest.fixture(scope="module")
def native(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    shared = tmp_path_factory.mktemp("kernels")
    with opened(default_model, shared, lanes=1, context=1024, exact=True) as loaded:
        yield Native(loaded)


@pytest.fixture(scope="module")
def wanted(native: Native) -> tuple[list[int], Logits]:
    """A text's token ids, and what native predicts along it."""
    ids = native.tokenizer.encode(TEXT.read_text())[:POSITIONS]
    return ids, native.rows(ids, FIRST)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_predictions_are_natives_alone_and_together(
    generation: str, folder: Path, wanted: tuple[list[int], Logits], tmp_path: Path
) -> None:
    ids, logits = wanted
    (tmp_path / "ids").write_text(json.dumps(ids))
    rows = tmp_path / "rows.npy"
    answer(generation, "force", str(folder), str(tmp_path / "ids"), str(rows), str(FIRST),
           cwd=tmp_path)  # fmt: skip
    for found in np.load(rows, mmap_mode="r"):
        measured = compare(iter([np.asarray(found)]), logits)
        assert measured.positions == POSITIONS - FIRST
        assert measured.clear > measured.positions // 4
        assert measured.kl < MOST_KL
        assert measured.disagreement == 0


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_install_serves_over_http_what_native_would_say(
    generation: str, folder: Path, home: Path, native: Native
) -> None:
    runtime = f"mlx@{GENERATIONS[generation]}"
    words = ["--runtime", runtime, "--lanes", "4", "--context", "512", "--mlx-compile", "false"]
    with serving([str(folder), *words], home) as server:

        def complete(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
            assert found.status_code == 200, found.text
            text: str = found.json()["choices"][0]["text"]
            return text

        alone = [complete(prompt) for prompt in PROMPTS[:1]]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(complete, PROMPTS))
        said = httpx.get(f"{server.url}/health").json()
    assert alone[0].startswith(" Paris")
    for prompt, text in [*zip(PROMPTS, alone, strict=False), *zip(PROMPTS, together, strict=True)]:
        ids = native.tokenizer.encode(prompt)
        told = native.tokenizer.encode(prompt + text)
        rows = native.rows(told, len(ids) - 1)[:-1]
        picked = rows[np.arange(len(rows)), told[len(ids) :]]
        assert len(rows) >= TOKENS // 2
        # Within a thousandth of the best token's logit: only a tie is broken otherwise.
        assert float((rows.max(axis=1) - picked).max()) < 1e-3
    assert said


# Environments of the user's own


def test_an_environment_of_ones_own_serves(folder: Path, home: Path, tmp_path: Path) -> None:
    own = interpreter("plain").parents[1]
    done = run(["serve", str(folder), "--runtime", "mlx", "--mlx-venv", str(own), "--plan"], home)
    assert done.code == 0, done.err
    assert "0.32.2" in done.out


def _bare(tmp_path: Path, *packages: str) -> Path:
    """An environment that holds only some modules, empty ones, after the interpreter's own."""
    made = tmp_path / "venv"
    venv.create(made, with_pip=False, symlinks=True)
    site = next(made.glob("lib/python*/site-packages"))
    for name in packages:
        held = interpreter("plain").parents[1] / site.relative_to(made) / name
        (site / name).symlink_to(held)
    return made


@pytest.mark.parametrize(
    ("packages", "lacking"),
    [
        ((), "lacks jinja2, msgspec, numpy, mlx, mlx_lm, tokenizers"),
        (("jinja2", "markupsafe", "numpy", "numpy.libs"), "lacks msgspec, mlx, mlx_lm, tokenizers"),
        (("msgspec", "numpy", "numpy.libs", "jinja2", "markupsafe"),
         "lacks mlx and mlx_lm and tokenizers"),
    ],
)  # fmt: skip
def test_what_an_environment_lacks_is_named(
    packages: tuple[str, ...], lacking: str, folder: Path, home: Path, tmp_path: Path
) -> None:
    made = _bare(tmp_path, *packages)
    done = run(["serve", str(folder), "--runtime", "mlx", "--mlx-venv", str(made)], home)
    assert done.code == 4
    assert f"environment of {made}" in done.err
    assert lacking in done.err
    assert "pip install" in done.err
    assert "mlx@" not in done.err


def test_an_install_by_name_beside_an_environment_of_ones_own_is_refused(
    folder: Path, home: Path
) -> None:
    own = interpreter("plain").parents[1]
    words = ["--runtime", "mlx@0.32.2", "--mlx-venv", str(own), "--plan"]
    done = run(["serve", str(folder), *words], home)
    assert (done.code, done.out) == (2, "")
    assert "--runtime mlx@0.32.2 names an install, --mlx-venv a runtime of your own" in done.err


def test_no_environment_at_all_is_refused_with_the_command_that_installs_one(
    folder: Path, tmp_path: Path
) -> None:
    done = run(["serve", str(folder), "--runtime", "mlx"], tmp_path / "home")
    assert done.code == 4
    assert "superfluid runtime install mlx" in done.err
    done = run(
        ["serve", str(folder), "--runtime", "mlx", "--mlx-venv", str(tmp_path / "none")],
        tmp_path / "home",
    )
    assert done.code == 4
    assert "has no bin/python" in done.err


# Through the whole of superfluid, on tiny models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    answer("plain", "write", str(root), "afm7", "gemma3", "llama", cwd=root)
    return root


def _changed(folder: Path, to: Path, name: str, **values: Any) -> Path:
    shutil.copytree(folder, to)
    path = to / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return to


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_fifo_in_a_folder_is_refused_and_not_waited_for(
    name: str, tiny: Path, home: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    done = run(["serve", str(folder), "--runtime", "mlx"], home)
    assert (done.code, done.out) == (3, "")
    assert f"{name} is no regular file" in done.err.splitlines()[-1]


def test_a_folder_of_links_serves_as_a_hubs_cache_has_it(
    tiny: Path, home: Path, tmp_path: Path
) -> None:
    blobs = Path(shutil.copytree(tiny / "llama", tmp_path / "blobs"))
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    words = ["--runtime", "mlx@0.32.2", "--lanes", "2", "--context", "64"]
    with serving([str(folder), *words, "--mlx-compile", "false"], home) as server:
        assert _ask(server, "hello").status_code == 200


def _ask(server: Server, prompt: object, tokens: int = 8) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def _got(server: Server) -> dict[str, Any]:
    (entry,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    got: dict[str, Any] = entry["superfluid"]["record"]["got"]
    return got


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("config.json", "model_file"),
        ("config.json", "auto_map"),
        ("tokenizer_config.json", "auto_map"),
    ],
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_code_that_a_folder_brings_is_refused_unless_it_is_trusted(
    generation: str, name: str, key: str, tiny: Path, home: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    code: Any = "own.py" if key == "model_file" else {"AutoTokenizer": ["own.Mine", None]}
    folder = _changed(tiny / "llama", tmp_path / "model", name, **{key: code})
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    done = run(["serve", str(folder), "--runtime", f"mlx@{GENERATIONS[generation]}"], home)
    assert (done.code, done.out) == (3, "")
    assert f"names Python code of its own ({key})" in done.err
    assert "--mlx-trust-model-code" in done.err
    assert not ran.exists()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_model_that_batches_wrongly_is_served_one_by_one_and_says_so(
    generation: str, tiny: Path, home: Path
) -> None:
    words = ["--runtime", f"mlx@{GENERATIONS[generation]}", "--lanes", "3", "--context", "64"]
    with serving([str(tiny / "afm7"), *words, "--mlx-compile", "false"], home) as server:
        assert _got(server)["decoding"].startswith("one sequence per call: a batch")
        prompts = ["hello", "a few words", "world again"]
        alone = [_ask(server, prompt).json()["choices"][0]["text"] for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            together = [it.json()["choices"][0]["text"] for it in pool.map(
                lambda prompt: _ask(server, prompt), prompts)]  # fmt: skip
        assert together == alone
        size = Tokenizer.from_file(str(tiny / "afm7" / "tokenizer.json")).get_vocab_size()
        for token in (-1, size, 99_999, 2**31 - 1, 2**40):
            assert _ask(server, [1, token]).status_code == 400, token
        assert _ask(server, [1, size - 1]).status_code == 200
        assert _ask(server, "hello", tokens=0).status_code == 400
        assert _ask(server, []).status_code == 400
        (worker,) = psutil.Process(server.pid).children()
        assert worker.is_running()


def test_kernels_are_compiled_inside_a_strict_sandbox(tiny: Path, home: Path) -> None:
    words = ["--runtime", "mlx@0.32.2", "--lanes", "3", "--context", "64", "--sandbox", "strict"]
    with serving([str(tiny / "gemma3"), *words], home) as server:
        got = _got(server)
        assert got["sandbox"]["level"] == "strict"
        there = shutil.which("g++") is not None
        assert got["kernels"] == ("compiled" if there else "not compiled: there is no g++")
        (worker,) = psutil.Process(server.pid).children()
        scratch = Path(worker.environ()["TMPDIR"])
        assert bool(list(scratch.glob("mlx/*/cpu/*.so"))) == there
        with ThreadPoolExecutor(3) as pool:
            answers = pool.map(lambda prompt: _ask(server, prompt), ["hello", "a few", "go " * 25])
        assert [it.status_code for it in answers] == [200] * 3


def test_without_a_compiler_it_serves_and_says_so(tiny: Path, home: Path, tmp_path: Path) -> None:
    words = ["--runtime", "mlx@0.32.2", "--lanes", "2", "--context", "64"]
    with serving([str(tiny / "gemma3"), *words], home, PATH=str(tmp_path)) as server:
        assert _got(server)["kernels"] == "not compiled: there is no g++"
        assert _ask(server, "hello").status_code == 200


def test_sequences_that_do_not_fit_are_refused_with_the_budget_that_would_do(
    tiny: Path, home: Path
) -> None:
    words = ["serve", str(tiny / "llama"), "--runtime", "mlx@0.32.2", "--lanes", "64"]
    words += ["--context", "512", "--plan"]
    done = run([*words, "--memory-budget", "400M"], home)
    assert done.code == 3
    assert "64 lanes of 512 tokens takes" in done.err
    budget = re.search(r"--memory-budget (\d+M)", done.err)
    assert budget is not None
    done = run([*words, "--memory-budget", budget[1]], home)
    assert done.code == 0, done.err

"""llama.cpp through the whole house: installed by it, served by it, refused by it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import psutil
import pytest

from superfluid_adapter_llamacpp.contracts import contracts
from superfluid_compat.errors import ExitCode
from support.gguf_writer import tensor, write_gguf
from support.llama_libraries import INSTALLED, library
from support.llama_standin import build
from support.server import Ended, Server, run, serving
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

CONTRACTS: Final = {"b11549": 8, "b11063": 7}
PROMPT: Final = {"model": "m", "prompt": "hello the river", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home into which the product has installed a build of each contract."""
    home = tmp_path_factory.mktemp("home")
    for version in CONTRACTS:
        done = run(["runtime", "install", "llamacpp", "--version", version], home, 300.0)
        assert done.code == 0, done
    return home


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", TinyModel())


def completed(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**PROMPT, **fields}, timeout=60.0)


def turns(server: Server) -> int:
    (stats,) = httpx.get(f"{server.url}/v1/superfluid/stats").json()["models"].values()
    return int(stats["turns"])


def test_what_was_installed_is_ready_by_its_number(home: Path) -> None:
    said = json.loads(run(["runtimes", "--json"], home).out)
    rows = {row["install"]: row for row in said["runtimes"] if row["id"] == "llamacpp"}
    assert {name: row["abi"] for name, row in rows.items()} == {
        f"{version}-cpu": number for version, number in CONTRACTS.items()
    }
    assert {row["state"] for row in rows.values()} == {"ready"}


@pytest.mark.parametrize("version", CONTRACTS)
def test_each_install_serves(version: str, home: Path, model: Path) -> None:
    words = [str(model), "--runtime", f"llamacpp@{version}-cpu", "--lanes", "2"]
    with serving([*words, "--threads", "1"], home) as server:
        (first, second) = (completed(server) for _ in range(2))
        assert first.status_code == 200, first.text
        assert first.json()["usage"]["completion_tokens"] == 8
        assert first.json()["choices"] == second.json()["choices"]
        (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert row["superfluid"]["runtime"] == f"llamacpp@{version}-cpu"


def test_an_installed_engine_serves_by_default_and_nothing_installed_leaves_it_to_native(
    home: Path, model: Path, tmp_path: Path
) -> None:
    assert "served by llamacpp@" in run(["runtimes", str(model)], home).out
    assert "served by native" in run(["runtimes", str(model)], tmp_path / "empty").out


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_library_of_ones_own_serves_without_an_install(
    way: str, model: Path, tmp_path: Path
) -> None:
    own = str(library(INSTALLED))
    flag = ["--llamacpp-lib", own] if way == "flag" else []
    extra = {} if way == "flag" else {"SUPERFLUID_LLAMA_LIB": own}
    with serving([str(model), "--threads", "1", *flag], tmp_path / "home", **extra) as server:
        assert completed(server).status_code == 200


def in_two_files(folder: Path, name: str = "libgomq.so.1") -> Path:
    """The library with one of its dependencies beside it, under a name that no system has."""
    ctypes.CDLL("libgomp.so.1")
    maps = Path("/proc/self/maps").read_text()
    (gomp,) = set(re.findall(r"/\S*libgomp\.so\.1\S*", maps))
    own = name.encode() + b"\0"
    (folder / name).write_bytes(Path(gomp).read_bytes().replace(b"libgomp.so.1\0", own))
    return with_bytes(folder, b"\0libgomp.so.1\0", b"\0" + own)


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_library_of_several_files_serves_from_its_own_folder(
    name: str, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    library = in_two_files(folder)
    own = library if name == "file" else folder
    words = [str(model), "--threads", "1", "--llamacpp-lib", str(own), "--untested"]
    with serving(words, tmp_path / "home") as server:
        assert completed(server).status_code == 200


def named_unlike_a_library(folder: Path) -> Path:
    """Its dependency's name does not begin as those of libraries do."""
    return in_two_files(folder, "oddgomq.so.1")


def linked_by_version(folder: Path) -> Path:
    """Files under their full versions, links under the names that are loaded."""
    in_two_files(folder)
    for name, real in (("libllama.so", "libllama.so.0.1"), ("libgomq.so.1", "libgomq.so.1.0.0")):
        (folder / name).rename(folder / real)
        (folder / name).symlink_to(real)
    return folder / "libllama.so"


def linked_from_elsewhere(folder: Path) -> Path:
    link = folder.parent / "elsewhere" / "libllama.so"
    link.parent.mkdir()
    link.symlink_to(in_two_files(folder))
    return link


def folder_linked_from_elsewhere(folder: Path) -> Path:
    in_two_files(folder)
    (folder.parent / "current").symlink_to(folder)
    return folder.parent / "current"


def found_by_its_runpath(folder: Path) -> Path:
    """All of it lies in a folder beside its own, which the linker is told of."""
    sibling = folder.parent / "engine"
    sibling.mkdir()
    shutil.copy(library(INSTALLED), sibling / "libengine.so.1")
    path = folder / "libllama.so"
    linked = ["-Wl,--no-as-needed", f"-L{sibling}", "-l:libengine.so.1"]
    linked.append("-Wl,-rpath,$ORIGIN/../engine")
    empty = ["-x", "c", "/dev/null", "-x", "none"]
    subprocess.run(["cc", "-shared", "-fPIC", *empty, "-o", str(path), *linked], check=True)
    assert b"\0libengine.so.1\0" in path.read_bytes()
    return path


@pytest.mark.parametrize(
    "make",
    [named_unlike_a_library, linked_by_version, linked_from_elsewhere,
     folder_linked_from_elsewhere, found_by_its_runpath],
)  # fmt: skip
def test_a_library_laid_out_in_any_usual_way_serves_from_within_the_sandbox(
    make: Callable[[Path], Path], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    words = [str(model), "--threads", "1", "--llamacpp-lib", str(make(folder)), "--untested"]
    with serving(words, tmp_path / "home") as server:
        assert completed(server).status_code == 200


def test_a_lone_library_is_installed_as_it_is(model: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(library(INSTALLED), tmp_path / "libllama.so"))
    home = tmp_path / "home"
    done = run(["runtime", "install", "llamacpp", "--from", str(own), "--untested"], home)
    assert done.code == 0, done
    words = [str(model), "--threads", "1", "--runtime", "llamacpp", "--untested"]
    with serving(words, home) as server:
        assert completed(server).status_code == 200


def in_build(folder: Path) -> Path:
    """A checkout with its build, as CMake lays it."""
    (folder / "build" / "bin").mkdir(parents=True)
    shutil.copy(library(INSTALLED), folder / "build" / "bin" / "libllama.so")
    return folder


def zipped(path: Path, member: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.write(library(INSTALLED), member)
    return path


@pytest.mark.parametrize("kind", ["checkout", "archive", "wheel"])
def test_a_library_that_lies_deep_is_found(kind: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    match kind:
        case "checkout":
            given = in_build(tmp_path / "llama.cpp")
            rows = json.loads(
                run(["runtimes", "--json"], home, SUPERFLUID_LLAMA_LIB=str(given)).out
            )
            states = {row["id"]: row["state"] for row in rows["runtimes"]}
            assert states["llamacpp"] == "ready"
        case "archive":
            given = zipped(tmp_path / "llama-b9.zip", "llama-b9/build/bin/libllama.so")
        case _:
            given = zipped(tmp_path / "llama_cpp-1-py3-none-any.whl", "llama_cpp/lib/libllama.so")
    done = run(["runtime", "install", "llamacpp", "--from", str(given), "--untested"], home)
    assert (done.code, done.out) == (0, f"llamacpp {INSTALLED}-local installed\n"), done.err


def test_many_prompts_that_branch_in_a_window_cost_one_worker_nothing(
    home: Path, tmp_path: Path
) -> None:
    """Each is copied from what came before as far as its window is held, and given back."""
    path = write_model(tmp_path / "m.gguf", TinyModel("gemma3", window=32, context=1024))
    drawn = np.random.default_rng(5)
    trunk = drawn.integers(5, 300, 400).tolist()
    words = [str(path), "--runtime", "llamacpp", "--threads", "1", "--lanes", "2"]
    with serving([*words, "--context", "512"], home) as server:
        worker = worker_of(server)
        for _ in range(80):
            at = int(drawn.integers(20, 400))
            prompt = trunk[:at] + drawn.integers(5, 300, 8).tolist()
            answer = completed(server, prompt=prompt, max_tokens=4, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
        assert worker_of(server) == worker


# What happens to a library while it serves.


def worker_of(server: Server) -> psutil.Process:
    (worker,) = [it for it in psutil.Process(server.pid).children() if "serve" in it.cmdline()]
    return worker


@pytest.mark.parametrize("what", ["touched", "swept"])
def test_a_library_is_judged_again_before_a_worker_starts_anew(
    what: str, model: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copy(library(INSTALLED), tmp_path / "libllama.so"))
    home = tmp_path / "home"
    words = [str(model), "--threads", "1", "--llamacpp-lib", str(own), "--untested"]
    with serving(words, home) as server:
        before = completed(server).json()["choices"]
        if what == "touched":
            os.utime(own, (1, 1))
        else:
            (kept,) = home.rglob("probe-*")
            kept.unlink()
        worker_of(server).kill()
        assert completed(server).json()["choices"] == before
    with serving(words, home) as server:
        assert completed(server).json()["choices"] == before


def test_what_becomes_of_a_library_that_is_taken_away_under_a_server_is_said(
    model: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copy(library(INSTALLED), tmp_path / "libllama.so"))
    words = [str(model), "--threads", "1", "--llamacpp-lib", str(own), "--untested"]
    with serving(words, tmp_path / "home") as server:
        assert completed(server).status_code == 200
        own.unlink()
        worker_of(server).kill()
        ended = server.wait()
    one_line(ended, ExitCode.RUNTIME, f"{own}: there is no such file")


def test_an_install_that_lost_a_file_under_a_server_is_to_be_repaired(
    home: Path, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "home"
    shutil.copytree(home, copy, symlinks=True)
    with serving([str(model), "--runtime", "llamacpp", "--threads", "1"], copy) as server:
        for file in copy.rglob("*.so"):
            file.unlink()
        worker_of(server).kill()
        ended = server.wait()
    one_line(ended, ExitCode.RUNTIME, "superfluid runtime repair llamacpp")


def test_tokenize_asks_the_install_that_is_named(home: Path, model: Path, tmp_path: Path) -> None:
    for runtime in ("llamacpp", *(f"llamacpp@{version}-cpu" for version in CONTRACTS)):
        words = ["tokenize", str(model), "--runtime", runtime]
        assert run(words, home).out == run(["tokenize", str(model)], home).out
    words = ["tokenize", str(model), "--runtime", "llamacpp"]
    own = str(library(INSTALLED))
    assert run(words, tmp_path / "none", SUPERFLUID_LLAMA_LIB=own).code == 0


# Libraries that do not serve: exit 4 and one line, from the command that would have served.


def with_bytes(folder: Path, old: bytes, new: bytes) -> Path:
    path = folder / "libllama.so"
    path.write_bytes(library(INSTALLED).read_bytes().replace(old, new))
    return path


def text_file(folder: Path) -> Path:
    path = folder / "libllama.so"
    path.write_text("no library at all\n")
    return path


def newer_glibc(folder: Path) -> Path:
    return with_bytes(folder, b"\0GLIBC_2.17\0", b"\0GLIBC_9.17\0")


def lacks_dependency(folder: Path) -> Path:
    return with_bytes(folder, b"\0libgomp.so.1\0", b"\0libgomq.so.1\0")


def other_machine(folder: Path) -> Path:
    path = Path(shutil.copy(library(INSTALLED), folder / "libllama.so"))
    with path.open("r+b") as file:
        file.seek(18)
        file.write((243).to_bytes(2, "little"))
    return path


def older_contract(folder: Path) -> Path:
    return library("b8672")


def other_defaults(folder: Path) -> Path:
    newest = contracts()[max(contracts())]
    return build(folder / "libllama.so", contract=newest, context={"n_ctx": 513})


def looks_right(folder: Path) -> Path:
    return build(folder / "libllama.so", contract=contracts()[7])


def dies(folder: Path) -> Path:
    return build(folder / "libllama.so", contract=contracts()[7], at_load="raise(SIGSEGV);")


def without_device(folder: Path) -> Path:
    return build(folder / "libllama.so", contract=contracts()[7], devices=0)


def lacks_functions(folder: Path) -> Path:
    return build(folder / "libllama.so", contract=contracts()[7], without=["llama_decode"])


REFUSED: Final[list[tuple[Callable[[Path], Path], str, str, str]]] = [
    (text_file, "broken", "cannot-load", "a shared library was wanted"),
    (newer_glibc, "broken", "cannot-load", "needs glibc 9.17, this machine has 2."),
    (lacks_dependency, "broken", "cannot-load", "needs libgomq.so.1"),
    (other_machine, "broken", "cannot-load", "is for riscv64, this machine is"),
    (dies, "broken", "cannot-load", "died by SIGSEGV while it loaded"),
    (lacks_functions, "broken", "not-llama", "lacks llama_decode"),
    (without_device, "broken", "no-device", "finds no device"),
    (older_contract, "refused", "number-differs", "is of contract 1, wanted"),
    (other_defaults, "refused", "unknown-abi", "n_ctx reads 513, wanted 512"),
    (
        looks_right,
        "broken",
        "canary-failed",
        "the defaults of contract 7, but not its behaviour: a model does not load",
    ),
]


@pytest.mark.parametrize(
    ("make", "state", "rule", "words"), REFUSED, ids=lambda it: getattr(it, "__name__", "")
)
def test_a_library_that_does_not_serve_is_exit_4_and_one_line(
    make: Callable[[Path], Path], state: str, rule: str, words: str, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    own = make(folder)
    ended = run(["serve", str(model), "--port", "0", "--llamacpp-lib", str(own)], tmp_path / "home")
    one_line(ended, ExitCode.RUNTIME, words)
    told = run(["runtimes", "--json"], tmp_path / "home", SUPERFLUID_LLAMA_LIB=str(own))
    rows = {row["id"]: row for row in json.loads(told.out)["runtimes"]}
    assert (rows["llamacpp"]["state"], rows["llamacpp"]["rule"]) == (state, rule)
    assert words in rows["llamacpp"]["problem"]
    assert rows["native"]["state"] == "ready"


def test_what_is_not_installed_is_told_of_what_was_given(tmp_path: Path) -> None:
    for make in (looks_right, lacks_dependency):
        folder = tmp_path / make.__name__
        folder.mkdir()
        own = make(folder)
        for source in (own, folder):
            words = ["runtime", "install", "llamacpp", "--from", str(source), "--untested"]
            ended = run(words, tmp_path / "home")
            one_line(ended, ExitCode.RUNTIME, f" {own} ")
            assert ".staging" not in ended.err


def test_a_library_of_ones_own_is_one_row_whatever_is_installed(home: Path) -> None:
    own = str(library(INSTALLED))
    said = json.loads(run(["runtimes", "--json"], home, SUPERFLUID_LLAMA_LIB=own).out)
    (row,) = [row for row in said["runtimes"] if row["id"] == "llamacpp"]
    assert (row["install"], row["state"], row["abi"]) == (None, "ready", CONTRACTS[INSTALLED])


def test_contracts_are_told_in_words(home: Path) -> None:
    said = run(["compat"], home).out
    assert "requires: llama.cpp struct contract 4 or" in said
    assert "mlx-lm 0.3" in said
    assert not set("{}'") & set(said)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SUPERFLUID_LLAMACPP_FLASH_ATTN", "junk", "option llamacpp-flash-attn was given 'junk'"),
        ("SUPERFLUID_LLAMACPP_JUNK", "1", "unknown option SUPERFLUID_LLAMACPP_JUNK"),
        ("SUPERFLUID_LLAMACPP_LAZY_MODE", "on", "lazy-mode"),
    ],
)
def test_an_option_that_no_install_takes_is_named_once(
    name: str, value: str, words: str, home: Path
) -> None:
    extra = {name: value, "SUPERFLUID_LLAMACPP_LOAD_MODE": "none"}
    ended = run(["runtimes"], home, 120.0, **extra)
    one_line(ended, ExitCode.USAGE, words)
    assert name in ended.err
    assert "broken" not in ended.out


def one_line(ended: Ended, code: ExitCode, words: str) -> None:
    assert ended.code == code, ended
    lines = [line for line in ended.err.splitlines() if line.startswith("superfluid: ")]
    assert len(lines) == 1, ended.err
    assert words in lines[0]
    assert "Traceback" not in ended.err


# Options and models that are wrong.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--llamacpp-threads", "0"], "option llamacpp-threads was given"),
        (["--llamacpp-thread", "1"], "did you mean --llamacpp-threads"),
        (["--llamacpp-cache-type-k", "i32"], "option llamacpp-cache-type-k was given"),
        (["--llamacpp-tensor-split", "a"], "tensor-split"),
        (["--llamacpp-n-gpu-layers", "5"], "finds 0 GPUs"),
        (["--llamacpp-cache-type-v", "q8_0", "--llamacpp-flash-attn", "off"], "cache-type-v"),
    ],
)
def test_an_option_that_is_wrong_is_exit_2_and_one_line(
    flags: list[str], words: str, home: Path, model: Path
) -> None:
    ended = run(["serve", str(model), "--port", "0", "--runtime", "llamacpp", *flags], home)
    one_line(ended, ExitCode.USAGE, words)


def filled(path: Path, name: str, value: float) -> None:
    """A model one of whose tensors holds the same value everywhere."""
    spec = TinyModel()
    tensors = model_tensors(spec)
    broken = next(it for it in tensors if it.name == name)
    wrong = tensor(broken.name, np.full(broken.shape, value, np.float32))
    tensors[tensors.index(broken)] = wrong
    write_gguf(path, model_metadata(spec), tensors)


def not_numbers(path: Path) -> None:
    filled(path, "blk.1.ffn_up.weight", np.nan)


def truncated(path: Path) -> None:
    write_model(path, TinyModel())
    os.truncate(path, path.stat().st_size // 2)


def lacks_tensor(path: Path) -> None:
    spec = TinyModel()
    write_gguf(path, model_metadata(spec), model_tensors(spec)[:-1])


@pytest.mark.parametrize(
    ("make", "words"),
    [(not_numbers, "invalid data"), (truncated, "ends at"), (lacks_tensor, "blk.1.ffn")],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_model_that_does_not_load_is_exit_3_and_one_line(
    make: Callable[[Path], None], words: str, home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    ended = run(["serve", str(path), "--port", "0", "--runtime", "llamacpp"], home)
    one_line(ended, ExitCode.MODEL, words)


def unknown(path: Path) -> None:
    """A model whose architecture nobody knows and that says all of itself."""
    spec = TinyModel()
    known = model_metadata(spec)
    metadata = {key.replace("llama.", "nosuch.", 1): value for key, value in known.items()}
    write_gguf(path, metadata | {"general.architecture": "nosuch"}, model_tensors(spec))


def twice(path: Path) -> None:
    """A model with two equal tokens, of which llama.cpp dies."""
    metadata = model_metadata(TinyModel())
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[-2]
    metadata["tokenizer.ggml.tokens"] = tokens
    write_gguf(path, metadata, model_tensors(TinyModel()))


def ranks(path: Path) -> None:
    write_model(path, TinyModel(metadata={"llama.pooling_type": 4}))


def plain(path: Path) -> None:
    write_model(path, TinyModel(head_dim=16))


NAMED: Final = {"SUPERFLUID_RUNTIME": "llamacpp"}
TOO_LITTLE: Final = {"SUPERFLUID_MEMORY_BUDGET": "32M"}
BAD_CACHE: Final = {"SUPERFLUID_LLAMACPP_CACHE_TYPE_K": "q8_0"}
BAD_LAYERS: Final = {"SUPERFLUID_LLAMACPP_N_GPU_LAYERS": "3"}


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (unknown, {}),
        (unknown, NAMED),
        (ranks, NAMED),
        (twice, NAMED),
        (truncated, {}),
        (lacks_tensor, {}),
        (lacks_tensor, NAMED),
        (plain, TOO_LITTLE),
        (plain, NAMED | TOO_LITTLE),
        (plain, BAD_CACHE),
        (plain, NAMED | BAD_CACHE),
        (plain, NAMED | BAD_LAYERS),
    ],
    ids=lambda it: "-".join(it.values()) if isinstance(it, dict) else it.__name__,
)
def test_what_would_serve_is_told_as_serving_tells_it(
    make: Callable[[Path], None], asked: dict[str, str], home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    told = run(["runtimes", str(path), "--json"], home, 120.0, **asked)
    said = json.loads(told.out)
    assert said["runtime"] is None, said
    ended = run(["serve", str(path), "--port", "0"], home, 120.0, **asked)
    planned = run(["serve", str(path), "--plan"], home, 120.0, **asked)
    assert (planned.code, planned.out) == (ended.code, ""), planned
    # A plan counts what its own process holds, which differs by some MiB.
    why = said["why"].split("; ")[0].partition(" MiB")[0].rstrip("0123456789")
    one_line(ended, said["exit_code"], why)


def test_a_model_that_the_engine_dies_of_is_damaged_for_every_command(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    twice(path)
    for words in (["tokenize"], ["serve", "--port", "0"]):
        ended = run([*words, str(path), "--runtime", "llamacpp"], home)
        one_line(ended, ExitCode.MODEL, f"{path}: runtime llamacpp died of reading it, by SIGABRT")


def test_what_the_engine_asserts_stands_in_the_dossier(
    home: Path, model: Path, tmp_path: Path
) -> None:
    with serving([str(model), "--runtime", "llamacpp", "--threads", "1"], home) as server:
        twice(tmp_path / "other.gguf")
        (tmp_path / "other.gguf").replace(model)
        worker_of(server).kill()
        failed = completed(server)
        ended = server.wait()
    assert failed.status_code >= 500
    assert ended.code == ExitCode.FAILURE
    told = run(["why"], home).out
    assert "killed by SIGABRT" in told
    assert "GGML_ASSERT(id_to_token.size() == token_to_id.size()) failed" in told


def test_a_model_that_overflows_is_told_of_and_its_worker_serves_on(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    filled(path, "output_norm.weight", 3e38)
    with serving([str(path), "--runtime", "llamacpp", "--threads", "1"], home) as server:
        worker = worker_of(server)
        for _ in range(2):
            answer = completed(server)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "not_finite")
            assert answer.headers["x-should-retry"] == "false"
            assert "the same request to this one ends the same way" in error["message"]
        streamed = completed(server, stream=True)
        assert '"not_finite"' in streamed.text
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=170) as client:
            (served,), before = client.models.list(), turns(server)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model=served.id, prompt="x", max_tokens=1)
            assert turns(server) == before + 1, "the client asked again"
        assert worker_of(server) == worker


def test_a_model_cut_short_under_a_server_is_named_when_its_worker_is_replaced(
    home: Path, model: Path
) -> None:
    with serving([str(model), "--runtime", "llamacpp", "--threads", "1"], home) as server:
        assert completed(server).status_code == 200
        os.truncate(model, 0)
        failed = completed(server)
        ended = server.wait()
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_damaged")
    assert "killed by SIGBUS" in ended.err
    assert ended.code == ExitCode.MODEL

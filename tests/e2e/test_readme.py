"""The README's calls, run as they stand there against a server of the default model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server, serving

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
PORT = "http://127.0.0.1:8453"

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("readme")
    # Under the name that the shelf gives it.
    model = folder / "gemma-3-270m.gguf"
    model.symlink_to(default_model)
    with serving([str(model)], folder / "home") as found:
        yield found


def block(kind: str, holding: str) -> str:
    blocks: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", README, re.M | re.S)
    return next(found for found in blocks if holding in found)


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_curl(server: Server) -> None:
    command = block("sh", "curl").replace(PORT, server.url)
    answer = json.loads(run(["bash", "-c", command]))
    assert answer["model"] == "gemma-3-270m"
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"].strip()


def test_the_openai_client_gives_what_the_curl_gives(server: Server) -> None:
    program = block("python", "openai").replace(PORT, server.url)
    said = run([sys.executable, "-c", program])
    answer = json.loads(run(["bash", "-c", block("sh", "curl").replace(PORT, server.url)]))
    assert said == answer["choices"][0]["text"] + "\n"

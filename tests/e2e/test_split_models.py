"""Models in several files, served from where a hub's cache keeps them."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from superfluid_compat.errors import ExitCode
from support.gguf_writer import write_split
from support.llama_libraries import INSTALLED, library
from support.server import run, serving
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

SPEC = TinyModel()
RUNTIMES = {"native": [], "llamacpp": ["--llamacpp-lib", str(library(INSTALLED))]}


def _cached(folder: Path) -> Path:
    """The snapshot of a split model in a cache: links to files that are named by digest."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    tensors = model_tensors(SPEC)
    parts = [tensors[:3], tensors[3:7], tensors[7:]]
    for number, path in enumerate(write_split(blobs, "m", model_metadata(SPEC), parts)):
        blob = path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("named", ["folder", "first part"])
def test_a_split_model_of_links_is_served_like_the_whole(
    runtime: str, named: str, tmp_path: Path
) -> None:
    snapshot = _cached(tmp_path / "models--o--m")
    model = snapshot if named == "folder" else snapshot / "m-00001-of-00003.gguf"
    options = ["--runtime", runtime, "--sandbox", "strict", *RUNTIMES[runtime]]
    said = []
    for path in (model, write_model(tmp_path / "whole.gguf", SPEC)):
        with serving([str(path), *options], tmp_path / "home") as server:
            body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
            said.append(httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"])
    assert said[0] == said[1]


@pytest.mark.parametrize("command", [["serve", "--plan"], ["runtimes"]])
def test_a_part_that_is_a_loop_of_links_is_named(command: list[str], tmp_path: Path) -> None:
    snapshot = _cached(tmp_path / "models--o--m")
    loop = snapshot / "m-00002-of-00003.gguf"
    loop.unlink()
    loop.symlink_to(loop)
    ended = run([command[0], str(snapshot), *command[1:]], tmp_path / "home")
    assert ended.code in (ExitCode.MODEL, ExitCode.FAILURE)
    assert f"{loop}: cannot be opened" in ended.out + ended.err
    assert "Traceback" not in ended.err

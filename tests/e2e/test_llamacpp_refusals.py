"""What the llama.cpp runtime does not serve is refused alike by the plan, the listing and `serve`,
before a worker starts; and what a refusal advises works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from superfluid_compat.errors import ExitCode
from support.llama_libraries import INSTALLED, library
from support.server import run, serving
from support.tiny_models import TinyModel, write_model

RUNTIME: Final = ("--runtime", "llamacpp", "--llamacpp-lib", str(library(INSTALLED)))


def test_a_split_over_gpus_that_are_not_here_is_refused_by_name(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m.gguf", TinyModel()))
    words, split = ["serve", model, *RUNTIME], ["--llamacpp-split-mode", "tensor"]
    said = "option llamacpp-split-mode: tensor was asked for, the library finds 0 GPUs here"
    for more in (["--plan"], ["--port", "0"]):
        done = run([*words, *split, *more], tmp_path / "home")
        assert done.code == ExitCode.USAGE, done
        assert said in done.err
    done = run(
        ["runtimes", model],
        tmp_path / "home",
        SUPERFLUID_LLAMACPP_SPLIT_MODE="tensor",
        SUPERFLUID_LLAMA_LIB=RUNTIME[-1],
    )
    assert done.code == ExitCode.FAILURE, done
    assert f"not served here: {said}" in done.out


def test_an_epsilon_that_is_no_number_is_refused_by_its_header(tmp_path: Path) -> None:
    broken = {"llama.attention.layer_norm_rms_epsilon": float("nan")}
    model = str(write_model(tmp_path / "m.gguf", TinyModel(metadata=broken)))
    done = run(["serve", model, *RUNTIME, "--port", "0"], tmp_path / "home")
    assert done.code == ExitCode.MODEL, done
    assert "layer_norm_rms_epsilon is nan" in done.err


def test_more_cells_than_there_can_be_are_refused_by_range(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m.gguf", TinyModel(context=1 << 24)))
    sizes = ["--lanes", "256", "--context", "16777216", "--memory-budget", "20000G"]
    done = run(["serve", model, *RUNTIME, *sizes, "--port", "0"], tmp_path / "home")
    assert done.code == ExitCode.MODEL, done
    assert "llama.cpp counts to 2147483647" in done.err


@pytest.mark.parametrize("what", ["context", "memory"])
def test_what_a_refusal_advises_serves(what: str, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m.gguf", TinyModel(head_dim=32, context=128)))
    asked = {"context": ["--context", "512"], "memory": ["--memory-budget", "16M"]}[what]
    first = ["serve", model, *RUNTIME, "--lanes", "1", "--threads", "1", *asked, "--port", "0"]
    done = run(first, tmp_path / "home")
    assert done.code == ExitCode.MODEL, done
    advice = re.search(r"--llamacpp-rope-scaling \S+ --\S+ \d+|--memory-budget \d+M", done.err)
    assert advice is not None, done
    kept = asked if what == "context" else []
    words = [model, *RUNTIME, "--lanes", "1", "--threads", "1", *kept, *shlex.split(advice[0])]
    with serving(words, tmp_path / "home"):
        pass

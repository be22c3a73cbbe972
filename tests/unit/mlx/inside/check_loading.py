"""Folders that are broken, that bring code, that do not fit: each a typed refusal."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superfluid_adapter_mlx import adapter
from superfluid_adapter_mlx.engine import cache_module
from superfluid_compat.errors import (
    BadOptionValue,
    DoesNotFit,
    ExitCode,
    ModelDamaged,
    ModelError,
    ModelNotFound,
    UnsupportedArchitecture,
)
from superfluid_workerd.adapter import LoadedModel, OpenRequest
from superfluid_workerd.registry import checked_options
from support.mlx_models import write_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def load(model: Path, budget: int | None = None, **given: Any) -> LoadedModel:
    options = {"compile": False, **given.pop("options", {})}
    return adapter().open(
        OpenRequest(
            model=model,
            scratch=model,
            shared=model,
            memory_budget=budget,
            options=checked_options(adapter(), options),
            **given,
        )
    )


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# Code of the model's own


@pytest.mark.parametrize("absolute", [False, True])
def test_code_that_a_folder_names_is_refused_unread(
    folder: Path, tmp_path: Path, absolute: bool
) -> None:
    marker, code = tmp_path / "ran", (tmp_path if absolute else folder) / "own.py"
    code.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    change(folder, model_file=str(code) if absolute else "own.py")
    with pytest.raises(ModelError, match="model_file") as refused:
        load(folder)
    assert "--mlx-trust-model-code" in refused.value.fix
    assert refused.value.exit_code == ExitCode.MODEL
    assert not marker.exists()
    with pytest.raises(ModelError):
        load(folder, options={"trust-model-code": True})
    assert marker.exists(), "trusted code is run"


def test_trusted_code_serves(folder: Path) -> None:
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    change(folder, model_file="own.py", model_type="mine")
    loaded = load(folder, options={"trust-model-code": True})
    assert loaded.facts.architecture == "mine"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_tokenizers_code_is_refused_and_stdin_unread(
    folder: Path, tmp_path: Path, name: str
) -> None:
    marker, there = tmp_path / "ran", os.dup(0)
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    change(folder, name, auto_map={"AutoTokenizer": ["own.Mine", None]})
    answers, writes = os.pipe()
    os.write(writes, b"y\n")
    os.dup2(answers, 0)
    try:
        for ask in (
            lambda: load(folder),
            lambda: adapter().tokenizer(folder, checked_options(adapter(), {})),
        ):
            with pytest.raises(ModelError, match="auto_map"):
                ask()
        assert os.read(0, 2) == b"y\n"
    finally:
        os.dup2(there, 0)
        for each in (answers, writes, there):
            os.close(each)
    assert not marker.exists()


# Nothing goes out


def test_no_network_is_asked_for_anything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was connected")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    for missing in (Path("not/here"), tmp_path / "nor-here"):
        with pytest.raises(ModelNotFound):
            load(missing)
    load(folder)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


# Broken folders


def _cut(name: str, to: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, to)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], object], type[ModelError], str]] = {
    "no config": (lambda it: (it / "config.json").unlink(), ModelNotFound, "config.json"),
    "no weights": (
        lambda it: (it / "model.safetensors").unlink(), ModelNotFound, "safetensors",
    ),
    "no tokenizer": (
        lambda it: (it / "tokenizer.json").unlink(), ModelNotFound, "tokenizer.json",
    ),
    "no JSON": (_write("config.json", "{"), ModelDamaged, "config.json"),
    "a list": (_write("config.json", "[]"), ModelDamaged, "config.json"),
    "deep JSON": (_write("config.json", "[" * 100_000), ModelDamaged, "config.json"),
    "no type": (lambda it: change(it, model_type=None), ModelDamaged, "model_type"),
    "a path as type": (lambda it: change(it, model_type="../x"), ModelDamaged, "model_type"),
    "unknown type": (lambda it: change(it, model_type="none_such"), UnsupportedArchitecture,
                     "none_such"),
    "no model's type": (lambda it: change(it, model_type="cache"), ModelDamaged, "model"),
    "empty weights": (_cut("model.safetensors", 0), ModelDamaged, "model.safetensors"),
    "half a length": (_cut("model.safetensors", 5), ModelDamaged, "model.safetensors"),
    "half a header": (_cut("model.safetensors", 300), ModelDamaged, "model.safetensors"),
    "half the weights": (_cut("model.safetensors", 100_000), ModelDamaged, "model.safetensors"),
    "another width": (lambda it: change(it, hidden_size=32), ModelDamaged, "model"),
    "too many weights": (lambda it: change(it, num_hidden_layers=1), ModelDamaged, "model"),
    "too few weights": (lambda it: change(it, num_hidden_layers=3), ModelDamaged, "model"),
    "a wrong tokenizer": (_write("tokenizer.json", "{}"), ModelDamaged, "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_does_not_load_and_its_file_is_named(folder: Path, what: str) -> None:
    breaks, kind, named = BROKEN[what]
    breaks(folder)
    with pytest.raises(kind) as refused:
        load(folder)
    assert named in refused.value.message
    assert refused.value.exit_code == ExitCode.MODEL


def test_a_model_whose_caches_are_wrong_here_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama4")
    if hasattr(cache_module.KVCache, "meta_state"):
        with pytest.raises(UnsupportedArchitecture, match="ChunkedKVCache loses tokens"):
            load(folder)
    else:
        loaded = load(folder, lanes=2)
        assert "ChunkedKVCache does not batch" in loaded.record.got["decoding"]


# Memory and context


def test_what_does_not_fit_is_refused_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from superfluid_adapter_mlx.engine import utils

    monkeypatch.setattr(utils, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DoesNotFit, match="the memory budget is 32 MiB"):
        load(folder, budget=32 << 20)
    with pytest.raises(DoesNotFit):
        adapter().memory(OpenRequest(model=folder, scratch=folder, shared=folder,
                                     memory_budget=32 << 20))  # fmt: skip


def test_lanes_that_do_not_fit_are_refused_or_get_less_where_that_was_left_open(
    folder: Path,
) -> None:
    plan = adapter().memory(OpenRequest(model=folder, scratch=folder, shared=folder))
    budget = sum(plan.values()) + 64 * 512 * 8
    with pytest.raises(DoesNotFit, match="8 lanes of 128 tokens"):
        load(folder, budget, context=128, lanes=8)
    assert load(folder, budget, lanes=8).record.got["context"] == 64
    assert load(folder, budget, context=64, lanes=8).runtime.describe().context == 64
    assert load(folder).record.got["context"] == 512


def test_past_what_the_model_was_made_for_is_refused(folder: Path) -> None:
    with pytest.raises(DoesNotFit, match="the model was made for 512"):
        load(folder, context=513)


# Facts and options


def test_what_a_load_got_stands_beside_what_was_asked(folder: Path) -> None:
    loaded = load(folder, context=100, lanes=3, options={"cache-limit-mb": 8})
    assert loaded.record.asked["cache-limit-mb"] == 8
    got = loaded.record.got
    assert (got["context"], got["lanes"], got["token-bytes"]) == (100, 3, 512)
    assert got["decoding"] == "together"
    assert got["mlx-lm"] in ("0.31.3", "0.32.0", "0.32.2")
    assert loaded.template is not None
    assert loaded.tokenizer.stops == {2}
    assert loaded.plan["sequences"] == 100 * 3 * 512


def test_options_are_checked(folder: Path) -> None:
    with pytest.raises(BadOptionValue):
        load(folder, options={"prefill-chunk": 0})


def test_a_check_says_what_computes(tmp_path: Path) -> None:
    found = adapter().check(checked_options(adapter(), {}), tmp_path)
    assert found.problem is None
    assert found.tested
    assert [device.kind for device in found.devices] == [
        "cpu" if sys.platform == "linux" else "gpu"
    ]

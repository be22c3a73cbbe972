"""Folders that are broken, that bring code, that do not fit: each a typed refusal."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superfluid_adapter_mlx import adapter
from superfluid_adapter_mlx.engine import cache_module, utils
from superfluid_adapter_mlx.folder import read_folder
from superfluid_compat.errors import (
    BadOptionValue,
    Capacity,
    DoesNotFit,
    ExitCode,
    ModelDamaged,
    ModelError,
    ModelNotFound,
    UnsupportedArchitecture,
)
from superfluid_workerd.adapter import Feed, LoadedModel, OpenRequest
from superfluid_workerd.registry import checked_options
from support.mlx_models import write_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def asked(model: Path, budget: int | None = None, **given: Any) -> OpenRequest:
    options = {"compile": False, **given.pop("options", {})}
    return OpenRequest(
        model=model,
        scratch=model,
        shared=model,
        memory_budget=budget,
        options=checked_options(adapter(), options),
        **given,
    )


def load(model: Path, budget: int | None = None, **given: Any) -> LoadedModel:
    return adapter().open(asked(model, budget, **given))


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
        lambda it: (it / "tokenizer.json").unlink(), ModelDamaged, "tokenizer.json",
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


def _bytes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _index(*tensors: str, file: object = "model.safetensors") -> Callable[[Path], object]:
    told = json.dumps({"weight_map": dict.fromkeys(tensors, file)})
    return _write("model.safetensors.index.json", told)


def _shape(*shape: object) -> Callable[[Path], object]:
    def breaks(folder: Path) -> None:
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        told = json.loads(whole[8:end])
        told["model.norm.weight"]["shape"] = shape
        head = json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + whole[end:])

    return breaks


SHOWN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a million layers": (lambda it: change(it, num_hidden_layers=10**6), "num_hidden_layers"),
    "layers past all memory": (lambda it: change(it, num_layers=2**62), "num_layers"),
    "layers of a text model": (
        lambda it: change(it, text_config={"num_hidden_layers": 10**6}), "num_hidden_layers",
    ),
    "a text for a number": (lambda it: change(it, rms_norm_eps="x"), "rms_norm_eps is 'x'"),
    "a template of no encoding": (
        _bytes("chat_template.jinja", b"\xff\xfe\0\x80"), "chat_template.jinja is not UTF-8",
    ),
    "an index of bytes": (
        _bytes("model.safetensors.index.json", b"\xff\xfe\0\x80"), "model.safetensors.index.json",
    ),
    "a list as index": (
        _write("model.safetensors.index.json", "[1]"), "model.safetensors.index.json",
    ),
    "an index without a map": (_index(), "index.json has no weight_map"),
    "an index of a lost file": (
        _index("model.norm.weight", file="model-00002-of-00002.safetensors"), "model-00002",
    ),
    "an index that leads out": (_index("model.norm.weight", file="../x.safetensors"), "../x"),
    "an index of no names": (_index("model.norm.weight", file=[1]), "file [1]"),
    "an index of a lost tensor": (_index("model.none.weight"), "'model.none.weight'"),
    "a float in a shape": (_shape(64.0), "'model.norm.weight' has shape"),
    "a shape below nothing": (_shape(-64), "'model.norm.weight' has shape"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHOWN)
def test_what_the_files_show_is_refused_by_name_before_a_model_is_built(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, named = SHOWN[what]
    breaks(folder)
    monkeypatch.setattr(utils, "load_model", lambda *_, **__: pytest.fail("a model was built"))
    for ask in (lambda: adapter().facts(folder), lambda: load(folder)):
        with pytest.raises(ModelDamaged) as refused:
            ask()
        assert named in refused.value.message
        assert refused.value.exit_code == ExitCode.MODEL


def test_what_mlx_lm_trips_over_is_not_called_an_unknown_architecture(folder: Path) -> None:
    change(folder, rms_norm_eps=[1])
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert "does not know" not in refused.value.message


def test_a_sound_index_and_a_byte_order_mark_change_nothing(folder: Path) -> None:
    before = load(folder)
    _index(*read_folder(folder).tensors)(folder)
    config = folder / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    after = load(folder)
    assert after.facts == before.facts
    assert after.record.got == before.record.got


_NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json",
    "chat_template.jinja", "model.safetensors", "model-00002-of-00002.safetensors",
)  # fmt: skip
_KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("kind", _KINDS)
def test_what_is_no_regular_file_is_refused_by_name_and_not_waited_for(
    folder: Path, name: str, kind: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    _KINDS[kind](folder / name)
    for ask in (lambda: adapter().facts(folder), lambda: load(folder)):
        with pytest.raises(ModelError) as refused:
            ask()
        assert name in refused.value.message
        assert refused.value.exit_code == ExitCode.MODEL
        assert len(refused.value.message.splitlines()) == 1


@pytest.mark.parametrize("name", _NAMES[:5] + _NAMES[8:])
def test_a_file_that_cannot_be_read_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    # A regular file that gives an error when it is read, to whoever reads it.
    (folder / name).symlink_to("/proc/self/mem" if sys.platform == "linux" else folder)
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja",
                                  "model.safetensors"])  # fmt: skip
def test_a_file_without_measure_is_refused_unread(folder: Path, name: str) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_empty_file_is_refused_by_name(folder: Path, name: str) -> None:
    os.truncate(folder / name, 0)
    with pytest.raises(ModelError, match=name):
        load(folder)


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
    from superfluid_adapter_mlx.engine import mx

    with monkeypatch.context() as patched:
        patched.setattr(utils, "load_model", lambda *_: pytest.fail("the model was built"))
        for ask in (adapter().memory, adapter().open):
            with pytest.raises(DoesNotFit, match="the memory budget is 32 MiB"):
                ask(asked(folder, 32 << 20))
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("weights were read"))
    change(folder, max_position_embeddings=1 << 20)
    for ask in (adapter().memory, adapter().open):
        with pytest.raises(DoesNotFit, match="8 lanes of 1000000 tokens") as refused:
            ask(asked(folder, 1 << 30, context=1_000_000, lanes=8))
        assert refused.value.exit_code == ExitCode.MODEL
        assert refused.value.param == "memory-budget"


def test_the_budget_that_a_refusal_names_would_do(folder: Path) -> None:
    """And the token's price in it is the shim's, whatever mlx-lm computes caches of."""
    change(folder, max_position_embeddings=1 << 20)
    with pytest.raises(DoesNotFit) as refused:
        load(folder, 400 << 20, context=20_000, lanes=8)
    named = re.search(r"--memory-budget (\d+)M", refused.value.fix)
    assert named is not None
    budget = int(named[1]) << 20
    with pytest.raises(DoesNotFit):
        adapter().memory(asked(folder, budget - (1 << 20), context=20_000, lanes=8))
    plan = adapter().memory(asked(folder, budget, context=20_000, lanes=8))
    assert plan["sequences"] == (20_000 + 256) * 8 * 512
    loaded = load(folder, budget, context=20_000, lanes=8)
    assert loaded.plan == plan
    assert loaded.record.got["memory-budget"] == sum(plan.values()) <= budget


def test_what_the_plan_says_of_sequences_is_never_held_by_more(folder: Path) -> None:
    loaded = load(folder, context=300, lanes=4)
    runtime, most = loaded.runtime, loaded.plan["sequences"]
    made = [runtime.seq_create() for _ in range(4)]
    for sequence, count in zip(made, (298, 3, 3, 3), strict=True):
        runtime.step([Feed(sequence, [1] * count, 0)], lambda: None)
    for turn in range(2):
        runtime.step([Feed(it, [2], runtime.seq_length(it)) for it in made], lambda: None)
        assert runtime.memory().sequences <= most, turn
    # Beside a batch whose rows are all as long as the longest, there is no room for another.
    with pytest.raises(Capacity, match="1200 tokens are held"):
        runtime.seq_copy(made[0], 5)


def test_lanes_get_less_where_their_context_was_left_open(folder: Path) -> None:
    change(folder, max_position_embeddings=4096)
    plan = adapter().memory(asked(folder, context=512))
    budget = plan["weights"] + plan["reserve"] + (1024 + 256) * 512 * 8
    assert load(folder, budget, lanes=8).record.got["context"] == 1024
    assert load(folder, lanes=8).record.got["context"] == 4096
    with pytest.raises(DoesNotFit, match="16 lanes of 512 tokens"):
        load(folder, budget, lanes=16)
    assert load(folder, budget, context=300, lanes=16).runtime.describe().context == 300


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
    assert loaded.tokenizer.stops == {0, 2}
    assert loaded.plan["sequences"] == (100 + 256) * 3 * 512


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

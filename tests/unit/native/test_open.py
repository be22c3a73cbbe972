"""Which format a path holds, and what a model's header says of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from superfluid_adapter_native.facts import facts_of
from superfluid_adapter_native.formats.open import open_source
from superfluid_compat.errors import ModelDamaged, ModelNotFound
from support.gguf_writer import tensor, write_gguf, write_split
from support.safetensors_writer import write_folder
from support.tiny_models import TinyModel, model_vocabulary, write_model

SPEC = TinyModel("llama", layers=1)


def test_a_gguf_file_whatever_its_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", SPEC)
    assert open_source(path).format == "gguf"


def test_a_link_to_a_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", SPEC)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert open_source(link).path == link


def test_a_folder_with_one_gguf_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", SPEC)
    (tmp_path / "config.json").write_text("{}")
    assert open_source(tmp_path).files == (path,)


def test_a_folder_with_a_split_model(tmp_path: Path) -> None:
    norm = tensor("output_norm.weight", np.ones(8, np.float32))
    parts = write_split(tmp_path, "m", {"general.architecture": "llama"}, [[norm], []])
    assert open_source(tmp_path).files == tuple(parts)


def test_a_folder_with_safetensors_by_its_name_or_a_file_in_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SPEC, shards=2)
    for path in (folder, folder / "model-00002-of-00002.safetensors"):
        source = open_source(path)
        assert (source.format, source.path, len(source.files)) == ("safetensors", folder, 2)


def test_a_folder_with_two_models_names_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_model(tmp_path / name, SPEC)
    with pytest.raises(ModelNotFound, match=r"holds 2 models \(a.gguf, b.gguf\), one was wanted"):
        open_source(tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"holds no model, a \*\.gguf file or config.json"):
        open_source(tmp_path)


def test_a_lone_safetensors_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SPEC)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json: cannot be opened"):
        open_source(folder / "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 8 + b"{", b"{}"])
def test_what_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelDamaged):
        open_source(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("absent", "fifo", "n" * 300, "nul\0"):
        with pytest.raises(ModelNotFound):
            open_source(tmp_path / name)


def test_facts_of_a_gguf(tmp_path: Path) -> None:
    spec = TinyModel(
        "gemma3", layers=3, types={"*ffn*": "Q8_0"}, metadata={"tokenizer.chat_template": "{{}}"}
    )
    path = write_model(tmp_path / "m.gguf", spec)
    facts = facts_of(open_source(path))
    assert (facts.format, facts.architecture, facts.name) == ("gguf", "gemma3", "tiny gemma3")
    assert facts.vocabulary == len(model_vocabulary(spec)["tokenizer.ggml.tokens"])
    assert (facts.context, facts.layers, facts.template) == (512, 3, True)
    assert facts.bytes == path.stat().st_size
    assert facts.types == {"F32": 2 + 3 * 10, "Q8_0": 9}
    block = 64 * (64 * 2 + 32 * 2 + 3 * 128) + 4 * 64 + 2 * 16
    assert facts.parameters == facts.vocabulary * 64 + 64 + 3 * block
    assert facts.detail["window"] == 64


def test_facts_of_a_folder(tmp_path: Path) -> None:
    facts = facts_of(open_source(write_folder(tmp_path / "m", SPEC, kind="BF16", shards=2)))
    assert (facts.format, facts.architecture, facts.layers) == ("safetensors", "llama", 1)
    assert facts.types.keys() == {"BF16"}
    assert facts.detail["files"] == 2


def test_facts_of_a_vocabulary_alone(tmp_path: Path) -> None:
    keys = {"general.architecture": "llama", **model_vocabulary(SPEC)}
    facts = facts_of(open_source(write_gguf(tmp_path / "v.gguf", keys, [])))
    assert facts.vocabulary == len(model_vocabulary(SPEC)["tokenizer.ggml.tokens"])
    assert (facts.parameters, facts.layers) == (0, 0)


def test_facts_that_are_no_numbers(tmp_path: Path) -> None:
    keys = {"general.architecture": "llama", "llama.context_length": "long"}
    with pytest.raises(ModelDamaged, match=r"llama\.context_length is 'long', a whole number"):
        facts_of(open_source(write_gguf(tmp_path / "m.gguf", keys, [])))

"""`tokenizer.json` folders, against the library that defines the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing

from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.tokenizers import load_tokenizer
from superfluid_compat.errors import ModelDamaged, OutOfBoundary
from superfluid_workerd.adapter import Tokenizer
from support import tiny_vocabularies as tiny
from support.tokenizer_cases import TEXTS


def byte_level() -> Engine:
    vocabulary = tiny.bpe()
    pieces = vocabulary["tokenizer.ggml.tokens"][:-1]
    merges = [tuple(line.split(" ")) for line in vocabulary["tokenizer.ggml.merges"]]
    engine = Engine(models.BPE({piece: token for token, piece in enumerate(pieces)}, merges))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}|\s+|[^\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    return engine


def sentencepiece() -> Engine:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlortw"]
    merges = [("\u2581", "h"), ("\u2581h", "e")]
    pieces += ["\u2581h", "\u2581he"]
    ids = {piece: token for token, piece in enumerate(pieces)}
    engine = Engine(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return engine


def write(folder: Path, engine: Engine, **files: dict[str, Any]) -> ModelSource:
    engine.add_special_tokens([AddedToken("<|begin|>", special=True), "<|im_end|>", "<|stop|>"])
    engine.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = engine.token_to_id("<|begin|>")
    engine.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    engine.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelSource(folder, "safetensors", (), "llama", {}, {}, "halves", 0)


CONFIG = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|stop|>"}


@pytest.fixture(params=[byte_level, sentencepiece])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Engine]:
    source = write(tmp_path, request.param(), tokenizer_config=CONFIG)
    return load_tokenizer(source), Engine.from_file(str(tmp_path / "tokenizer.json"))


def test_ids_and_texts_are_the_library_s(pair: tuple[Tokenizer, Engine]) -> None:
    ours, engine = pair
    assert ours.size == engine.get_vocab_size()
    for text in (*TEXTS, "<|begin|>x<|im_end|> <tool>y"):
        ids = engine.encode(text).ids
        assert ours.encode(text, special=True) == ids
        assert ours.decode(ids).decode("utf-8", "replace") == engine.decode(ids)


def test_special_tokens_in_a_text_are_text_unless_asked_for(
    pair: tuple[Tokenizer, Engine],
) -> None:
    ours, engine = pair
    stop, tool = engine.token_to_id("<|im_end|>"), engine.token_to_id("<tool>")
    ids = ours.encode("a<|im_end|><tool>", add_special=False)
    assert stop is not None
    assert tool is not None
    assert stop not in ids
    assert ids[-1] == tool
    assert stop in ours.encode("a<|im_end|>", special=True)
    assert ours.piece(stop) == b""
    assert ours.piece(stop, special=True) == b"<|im_end|>"
    assert ours.piece(tool) == b"<tool>"
    with pytest.raises(OutOfBoundary):
        ours.piece(ours.size)


def test_stops_come_from_all_the_files(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        byte_level(),
        tokenizer_config=CONFIG,
        generation_config={"eos_token_id": [5, 6]},
    )
    tokenizer = load_tokenizer(source)
    engine = Engine.from_file(str(tmp_path / "tokenizer.json"))
    named = {engine.token_to_id("<|stop|>"), engine.token_to_id("<|im_end|>")}
    assert tokenizer.stops == {5, 6} | named
    assert tokenizer.bos == engine.token_to_id("<|begin|>")
    assert tokenizer.eos == engine.token_to_id("<|stop|>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "[]", "cannot be read as a tokenizer"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", "[" * 100_000, "cannot be read"),
        ("tokenizer_config.json", "\x00", "cannot be read"),
        ("generation_config.json", '{"eos_token_id": 99999}', "eos_token_id 99999 is no token"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id 'x' is no token"),
    ],
)
def test_damaged_files_are_damage(tmp_path: Path, name: str, content: str, message: str) -> None:
    source = write(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelDamaged, match=message):
        load_tokenizer(source)


def test_a_folder_without_tokenizer_is_damage(tmp_path: Path) -> None:
    source = ModelSource(tmp_path, "safetensors", (), "llama", {}, {}, "halves", 0)
    with pytest.raises(ModelDamaged, match=r"no tokenizer\.json"):
        load_tokenizer(source)


def test_without_a_generation_config_the_models_own_says_where_to_stop(tmp_path: Path) -> None:
    source = write(tmp_path, byte_level(), config={"eos_token_id": [7, -1, 99_999, True]})
    ended = Engine.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_end|>")
    assert load_tokenizer(source).stops == {7, ended}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(source).stops == {5, ended}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("setting", ["truncation", "padding", "dropout"])
def test_what_training_left_in_the_file_changes_no_prompt(
    tmp_path: Path, setting: str, special: bool
) -> None:
    engine = byte_level()
    wanted = load_tokenizer(write(tmp_path, engine)).encode("hello there", special=special)
    match setting:
        case "truncation":
            engine.enable_truncation(3)
        case "padding":
            engine.enable_padding(length=1_000)
        case _:
            engine.model.dropout = 1.0
    engine.save(str(tmp_path / "tokenizer.json"))
    assert engine.encode("hello there").ids != wanted
    found = load_tokenizer(ModelSource(tmp_path, "safetensors", (), "llama", {}, {}, "halves", 0))
    assert found.encode("hello there", special=special) == wanted

"""The GGUF reader: against the reference package, and against files that are wrong."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType

from superfluid_adapter_native.formats.arrays import StringArray
from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.quants.types import BY_NAME, TYPES
from superfluid_compat.errors import ModelDamaged, ModelError, ModelNotFound, UnsupportedType
from support.gguf_writer import (
    Kind,
    TensorData,
    Typed,
    gguf_bytes,
    random_tensor,
    tensor,
    write_gguf,
    write_split,
)
from support.mutations import mutated
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

ARCHITECTURE = {"general.architecture": "llama"}


def tensors(*names: str) -> list[TensorData]:
    return [tensor(name, np.full((2, 4), place, np.float32)) for place, name in enumerate(names)]


def content(source: ModelSource, name: str) -> bytes:
    found = source.tensors[name]
    with source.files[found.file].open("rb") as stream:
        stream.seek(found.offset)
        return stream.read(found.bytes)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(found, (StringArray, memoryview)):
        return list(found) == list(wanted)
    return bool(found == wanted)


def reference_value(field: Any) -> Any:
    if field.types[0] is GGUFValueType.ARRAY and field.types[-1] is GGUFValueType.STRING:
        return [bytes(field.parts[place]).decode() for place in field.data]
    return field.contents()


@pytest.mark.parametrize(
    "spec",
    [
        TinyModel("llama"),
        TinyModel("gemma3"),
        TinyModel("qwen3moe"),
        TinyModel("llama", pre="gpt-2"),
    ],
    ids=["llama", "gemma3", "qwen3moe", "bpe"],
)
def test_reads_what_the_reference_reader_reads(tmp_path: Path, spec: TinyModel) -> None:
    spec = replace(spec, types={"*attn*": "Q8_0", "*ffn*": "Q4_0"})
    path = write_model(tmp_path / "tiny.gguf", spec)
    source = read_gguf(path)
    reference = GGUFReader(path)
    fields = {
        name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")
    }
    assert set(source.metadata) == set(fields)
    for name, field in fields.items():
        assert same(source.metadata[name], reference_value(field)), name
    assert list(source.tensors) == [one.name for one in reference.tensors]
    for one in reference.tensors:
        found = source.tensors[one.name]
        assert found.type.name == one.tensor_type.name
        assert found.shape == tuple(int(size) for size in one.shape[::-1])
        assert (found.offset, found.bytes) == (one.data_offset, one.n_bytes)
    assert source.total_bytes == path.stat().st_size


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    made = tensors("a", "b")
    path = write_gguf(tmp_path / "m.gguf", ARCHITECTURE, made, version=version, alignment=alignment)
    source = read_gguf(path)
    assert [content(source, one.name) for one in made] == [one.raw for one in made]


def test_values_of_every_type(tmp_path: Path) -> None:
    scalars: dict[Kind, Any] = {
        Kind.U8: 255, Kind.I8: -128, Kind.U16: 65535, Kind.I16: -32768, Kind.U32: 2**32 - 1,
        Kind.I32: -(2**31), Kind.F32: 0.5, Kind.BOOL: True, Kind.STRING: "日本 \0 é",
        Kind.U64: 2**64 - 1, Kind.I64: -(2**63), Kind.F64: 1e300,
    }  # fmt: skip
    written: dict[str, Any] = {kind.name: Typed(kind, value) for kind, value in scalars.items()}
    written |= {
        f"array.{kind.name}": Typed(kind, [value] * 3, array=True)
        for kind, value in scalars.items()
    }
    written["empty"] = Typed(Kind.STRING, [], array=True)
    source = read_gguf(write_gguf(tmp_path / "m.gguf", ARCHITECTURE | written, []))
    for kind, value in scalars.items():
        assert source.metadata[kind.name] == value
        array = source.metadata[f"array.{kind.name}"]
        assert isinstance(array, Sequence)
        assert list(array) == [value] * 3
        assert type(array[0]) is type(value)
    assert list(source.metadata["empty"]) == []


def test_every_tensor_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [random_tensor(kind.name, kind.name, (3, 512), rng) for kind in TYPES]
    source = read_gguf(write_gguf(tmp_path / "m.gguf", ARCHITECTURE, made))
    for one in made:
        assert source.tensors[one.name].type is one.type
        assert content(source, one.name) == one.raw


def test_strings_behave_as_a_sequence(tmp_path: Path) -> None:
    texts = ["", "a", "日本", "<unk>"]
    path = write_gguf(tmp_path / "m.gguf", {**ARCHITECTURE, "tokens": texts}, [])
    found = read_gguf(path).metadata["tokens"]
    assert isinstance(found, StringArray)
    assert (found[-1], found[1:3], len(found), found.raw_at(2)) == (
        "<unk>", ["a", "日本"], 4, "日本".encode(),
    )  # fmt: skip
    with pytest.raises(IndexError):
        found[4]
    path.unlink()
    assert list(found) == texts


def test_a_string_that_is_not_utf8_is_refused_when_asked_for(tmp_path: Path) -> None:
    tokens = Typed(Kind.STRING, [b"ok", b"\xff\xfe"], array=True)
    path = write_gguf(tmp_path / "m.gguf", {**ARCHITECTURE, "tokens": tokens}, [])
    found = read_gguf(path).metadata["tokens"]
    assert (found[0], found.raw_at(1)) == ("ok", b"\xff\xfe")
    with pytest.raises(ModelDamaged, match=r"m\.gguf: tokens\[1\]: is not UTF-8"):
        found[1]
    with pytest.raises(ModelDamaged, match=r"m\.gguf: tokens\[1\]: is not UTF-8"):
        list(found)


def test_rope_layout_by_architecture(tmp_path: Path) -> None:
    for name, wanted in (("llama", "pairs"), ("gemma3", "halves"), ("qwen2", "halves")):
        path = write_gguf(tmp_path / f"{name}.gguf", {"general.architecture": name}, [])
        assert read_gguf(path).rotated == wanted


def test_a_split_model_opens_by_any_part(tmp_path: Path) -> None:
    parts = write_split(tmp_path, "m", ARCHITECTURE, [tensors("a"), tensors("b", "c"), []])
    for part in parts:
        source = read_gguf(part)
        assert source.files == tuple(parts)
        assert source.path == part
        assert source.architecture == "llama"
        assert {name: one.file for name, one in source.tensors.items()} == {"a": 0, "b": 1, "c": 1}
        assert content(source, "c") == tensors("b", "c")[1].raw
        assert source.total_bytes == sum(one.stat().st_size for one in parts)


def break_split_missing(parts: list[Path]) -> None:
    parts[1].unlink()


def break_split_swapped(parts: list[Path]) -> None:
    saved = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(saved)


def break_split_doubled(parts: list[Path]) -> None:
    write_split(parts[0].parent, "m", ARCHITECTURE, [tensors("a"), tensors("a"), tensors("c")])


def break_split_count(parts: list[Path]) -> None:
    split = {"split.no": 1, "split.count": 3}
    write_gguf(parts[1], split, tensors("b", "d"))


def break_split_foreign(parts: list[Path]) -> None:
    write_gguf(parts[1], ARCHITECTURE, tensors("b"))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (break_split_missing, ModelNotFound, "00002-of-00003.gguf: cannot be opened"),
        (break_split_swapped, ModelDamaged, "says it is part 3 of 3, 2 of 3 was wanted"),
        (break_split_doubled, ModelDamaged, "tensor 'a' is there twice"),
        (break_split_count, ModelDamaged, "3 parts hold 4 tensors, not 3"),
        (break_split_foreign, ModelDamaged, "part 0 of 0, 2 of 3 was wanted"),
    ],
)
def test_split_models_that_are_wrong(
    tmp_path: Path,
    damage: Callable[[list[Path]], None],
    error: type[ModelError],
    message: str,
) -> None:
    parts = write_split(tmp_path, "m", ARCHITECTURE, [tensors("a"), tensors("b"), tensors("c")])
    damage(parts)
    with pytest.raises(error, match=message):
        read_gguf(parts[0])


def test_a_renamed_part_says_what_name_was_wanted(tmp_path: Path) -> None:
    part = write_split(tmp_path, "m", ARCHITECTURE, [tensors("a"), tensors("b")])[0]
    renamed = part.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelDamaged, match=r"ends in -00001-of-00002\.gguf was wanted"):
        read_gguf(renamed)


def head(version: int = 3, tensor_count: int = 0, keys: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensor_count, keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def array_of(kind: int, count: int, rest: bytes = b"") -> bytes:
    return head(keys=1) + key(b"k", 9, struct.pack("<IQ", kind, count) + rest)


def described(
    shape: tuple[int, ...] = (4, 2), type_id: int = 0, offset: int = 0, name: bytes = b"t"
) -> bytes:
    return (
        struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", type_id, offset)
    )  # fmt: skip


def holding(*descriptions: bytes, data: int = 64) -> bytes:
    start = head(tensor_count=len(descriptions), keys=1)
    start += key(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    start += b"".join(descriptions)
    return start + bytes(-len(start) % 32 + data)


HUGE = 1 << 60
WRONG: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", ModelDamaged, "is empty"),
    "short": (b"GG", ModelDamaged, "begins with b'GG'"),
    "magic-only": (b"GGUF", ModelDamaged, "ends after 4 bytes"),
    "text": (b"hello, I am a text", ModelDamaged, "begins with b'hell'"),
    "ggjt": (b"tjgg" + bytes(64), UnsupportedType, "GGJT"),
    "zip": (b"PK\3\4" + bytes(64), UnsupportedType, "zip archive"),
    "version-1": (head(1), UnsupportedType, "GGUF version 1, version 2 or 3 was wanted"),
    "version-99": (head(99), UnsupportedType, "GGUF version 99"),
    "big-endian": (head(3 << 24), UnsupportedType, "big-endian GGUF version 3"),
    "tensors-2^60": (head(tensor_count=HUGE), ModelDamaged, f"promises {HUGE} tensors"),
    "keys-2^60": (head(keys=HUGE), ModelDamaged, f"promises {HUGE} keys"),
    "tensors-missing": (head(tensor_count=9), ModelDamaged, "bytes, 0 are left"),
    "key-2^60": (head(keys=1) + struct.pack("<Q", HUGE), ModelDamaged, f"a key of {HUGE} bytes"),
    "key-not-utf8": (head(keys=1) + key(b"\xff", 0, b"\0"), ModelDamaged, "not UTF-8"),
    "key-twice": (head(keys=2) + key(b"k", 0, b"\0") * 2, ModelDamaged, "key 'k' is there twice"),
    "string-2^60": (
        head(keys=1) + key(b"k", 8, struct.pack("<Q", HUGE)), ModelDamaged, f"takes {HUGE} bytes",
    ),
    "string-not-utf8": (
        head(keys=1) + key(b"k", 8, struct.pack("<Q", 2) + b"\xc3("), ModelDamaged, "not UTF-8",
    ),
    "value-type": (head(keys=1) + key(b"k", 13, b""), ModelDamaged, "value type 13"),
    "array-2^60": (array_of(5, HUGE), ModelDamaged, "bytes, 0 are left"),
    "array-type": (array_of(77, 1), ModelDamaged, "array of value type 77"),
    "array-nested": (array_of(9, 1, bytes(12)), ModelDamaged, "array of arrays"),
    "strings-2^60": (array_of(8, HUGE), ModelDamaged, "at most 4194304 were wanted"),
    "strings-few": (array_of(8, 9, bytes(8)), ModelDamaged, r"\[1\] lies past the end"),
    "strings-item-2^60": (
        array_of(8, 2, struct.pack("<Q", HUGE)), ModelDamaged, r"\[1\] lies past the end",
    ),
    "strings-last-2^60": (
        array_of(8, 1, struct.pack("<Q", HUGE)), ModelDamaged, "takes 1152921504606846984 bytes",
    ),
    "strings-item-2^64": (
        array_of(8, 2, struct.pack("<Q", 2**64 - 1)), ModelDamaged, r"\[0\] lies past the end",
    ),
    "no-architecture": (head(), ModelDamaged, "general.architecture is None"),
    "architecture-number": (
        head(keys=1) + key(b"general.architecture", 4, bytes(4)), ModelDamaged, "is 0, a name",
    ),
    "alignment": (
        head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 3)), ModelDamaged, "is 3",
    ),
    "rank-0": (holding(described(())), ModelDamaged, "0 dimensions"),
    "rank-5": (holding(described((1,) * 5)), ModelDamaged, "5 dimensions"),
    "shape-0": (holding(described((4, 0))), ModelDamaged, r"shape \(0, 4\)"),
    "shape-overflow": (
        holding(described((1 << 32, 1 << 32))), ModelDamaged, "ends at byte 73786976294838206",
    ),
    "shape-block": (holding(described((33, 1), 8)), ModelDamaged, "whole 32 weights"),
    "type-known": (holding(described(type_id=16)), UnsupportedType, "'t' is of type IQ2_XXS"),
    "type-unknown": (holding(described(type_id=999)), UnsupportedType, "number 999, one of F32"),
    "offset-outside": (holding(described(offset=64)), ModelDamaged, "ends at byte"),
    "offset-2^60": (holding(described(offset=HUGE)), ModelDamaged, "ends at byte"),
    "offset-misaligned": (holding(described(offset=4)), ModelDamaged, "multiple of 32"),
    "overlap": (
        holding(described((16, 1)), described((8, 1), offset=32, name=b"u")), ModelDamaged,
        "'t' and 'u' overlap",
    ),
    "same-place": (holding(described(), described(name=b"u")), ModelDamaged, "overlap"),
    "name-twice": (
        holding(described(), described(offset=32)), ModelDamaged, "tensor 't' is there twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_files_that_are_wrong(
    tmp_path: Path, raw: bytes, error: type[ModelError], message: str
) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(raw)
    with pytest.raises(error, match=message) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message
    assert len(caught.value.line()) < 500 + len(str(path))
    assert "\n" not in caught.value.line()


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = gguf_bytes({**ARCHITECTURE, "tokens": ["a", "bc"], "n": [1, 2]}, tensors("a", "b"))
    path = tmp_path / "cut.gguf"
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelDamaged):
            read_gguf(path)


@pytest.mark.parametrize("kind", [0, 8])
def test_a_header_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "giant.gguf"
    path.write_bytes(array_of(kind, 1 << 31))
    os.truncate(path, 1 << 34)
    tracemalloc.start()
    try:
        with pytest.raises(ModelDamaged, match=r"at most 4194304|header of more"):
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def a_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "thing")
    return folder / "thing"


def a_loop(folder: Path) -> Path:
    (folder / "thing").symlink_to("other")
    (folder / "other").symlink_to("thing")
    return folder / "thing"


def a_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "thing"))
    return folder / "thing"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "No such file"),
        (lambda folder: folder, "is a folder"),
        (a_fifo, "is a FIFO"),
        (a_loop, "symbolic links"),
        (a_socket, "cannot be opened"),
        (lambda folder: Path("/dev/zero"), "is a character device"),
        (lambda folder: folder / "nul\0byte", "null byte"),
        (lambda folder: folder / ("long" * 100), "too long"),
    ],
    ids=["absent", "folder", "fifo", "loop", "socket", "device", "nul", "long"],
)
def test_things_that_are_no_file(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(ModelNotFound, match=message):
        read_gguf(make(tmp_path))


def test_a_large_vocabulary_builds_nothing_per_entry(tmp_path: Path) -> None:
    tokens = [f"piece {place}" for place in range(100_000)]
    path = write_gguf(tmp_path / "m.gguf", {**ARCHITECTURE, "tokens": tokens}, [])
    tracemalloc.start()
    try:
        found = read_gguf(path).metadata["tokens"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The strings' bytes, eight more for each one's place, and room for their growing.
    assert peak < 2 * path.stat().st_size + 8 * len(tokens)
    assert found[99_999] == "piece 99999"


def small() -> bytes:
    spec = TinyModel("llama", layers=1, width=32, heads=2, kv_heads=1, ff=32, types={"*": "Q8_0"})
    keys = {**model_metadata(spec), "some.floats": [0.5, 1.5]}
    return gguf_bytes(keys, model_tensors(spec))


def fuzz(folder: Path, count: int, seed: int) -> set[str]:
    """Read `count` mutations; the kinds of outcome seen. Anything but a typed error or a source
    whose strings can be asked for raises."""
    whole, rng, path = small(), random.Random(seed), folder / "fuzz.gguf"
    seen: set[str] = set()
    for _ in range(count):
        path.write_bytes(mutated(whole, rng))
        started = time.process_time()
        try:
            source = read_gguf(path)
            for value in source.metadata.values():
                if isinstance(value, StringArray):
                    list(value)
            seen.add("read")
        except ModelError as error:
            seen.add(error.code)
        assert time.process_time() - started < 2
    return seen


def test_mutations_end_in_a_model_or_a_typed_error(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        seen = fuzz(tmp_path, 600, seed=7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == {"read", "model_damaged", "unsupported_type"}
    assert peak < 64 << 20


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_many_mutations(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, 5000, seed=100 + seed)


def test_a_type_we_do_not_read_is_refused_by_name(tmp_path: Path) -> None:
    wrong = TensorData("w", BY_NAME["F32"], (2, 4), bytes(32), ggml=29)
    path = write_gguf(tmp_path / "m.gguf", ARCHITECTURE, [wrong])
    with pytest.raises(UnsupportedType, match="'w' is of type IQ1_M"):
        read_gguf(path)

"""Files of others, read by us: any bytes end in an answer or in an error of the tree."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_adapter_llamacpp.contracts import contracts
from superfluid_adapter_llamacpp.elf import NotElf, here, read_elf
from superfluid_adapter_llamacpp.facts import facts_of
from superfluid_adapter_llamacpp.gguf import read_header
from superfluid_adapter_llamacpp.tiny import tiny_model
from superfluid_compat.errors import ModelDamaged, ModelError, ModelNotFound, UnsupportedType
from support.gguf_writer import write_split
from support.llama_standin import build
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

EDITS = st.lists(
    st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def edited(data: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(data)
    for at, piece in edits:
        changed[at : at + len(piece)] = piece
    return bytes(changed)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_model())
    return path


@settings(deadline=None, max_examples=300)
@given(edits=EDITS, share=st.floats(0, 1))
def test_any_gguf_is_read_or_refused(
    model: Path, folder: Path, edits: list[tuple[int, bytes]], share: float
) -> None:
    path, data = folder / "edited.gguf", model.read_bytes()
    path.write_bytes(edited(data, edits)[: int(len(data) * share) + 1])
    with contextlib.suppress(ModelError):
        facts_of(read_header(path))


@pytest.fixture(scope="module")
def shared_object(folder: Path) -> Path:
    return build(folder / "lib.so", contract=contracts()[7], at_load="raise(0);")


@settings(deadline=None, max_examples=300)
@given(edits=EDITS, cut=st.integers(0, 20_000))
def test_any_elf_is_read_or_refused(
    shared_object: Path, folder: Path, edits: list[tuple[int, bytes]], cut: int
) -> None:
    path, data = folder / "edited.so", shared_object.read_bytes()
    path.write_bytes(edited(data, edits)[: len(data) - cut] or b"\x7f")
    with contextlib.suppress(NotElf):
        read_elf(path)


def test_an_elf_says_what_it_was_linked_to(shared_object: Path) -> None:
    found = read_elf(shared_object)
    assert found.machine == here()
    assert "libc.so.6" in found.needed
    assert found.glibc >= (2, 2)


def test_the_facts_are_the_files(tmp_path: Path) -> None:
    spec = TinyModel("gemma3", layers=3, context=777)
    facts = facts_of(read_header(write_model(tmp_path / "m.gguf", spec)))
    tensors = model_tensors(spec)
    assert (facts.architecture, facts.layers, facts.context) == ("gemma3", 3, 777)
    assert facts.types == {"F32": len(tensors)}
    assert facts.parameters == sum(len(it.raw) // 4 for it in tensors)
    assert facts.bytes == (tmp_path / "m.gguf").stat().st_size


def test_a_split_model_is_read_whole_from_its_first_part(tmp_path: Path) -> None:
    spec = TinyModel()
    tensors = model_tensors(spec)
    paths = write_split(tmp_path, "m", model_metadata(spec), [tensors[:5], tensors[5:]])
    header = read_header(paths[0])
    assert len(header.tensors) == len(tensors)
    assert header.size == sum(path.stat().st_size for path in paths)
    paths[1].unlink()
    with pytest.raises(ModelNotFound):
        read_header(paths[0])


def test_two_fine_tunes_of_one_model_have_other_fingerprints(tmp_path: Path) -> None:
    one, same, other = (
        read_header(write_model(tmp_path / f"{name}.gguf", TinyModel(seed=seed))).fingerprint
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", ModelDamaged, "is empty"),
        (b"PK\x03\x04" + bytes(60), ModelDamaged, "b'GGUF' was wanted"),
        (b"GGUF" + (99).to_bytes(4, "little") + bytes(60), UnsupportedType, "version 99"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), UnsupportedType, "is big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, ModelDamaged, "counts"),
    ],
)
def test_what_is_no_gguf_is_said(
    tmp_path: Path, content: bytes, kind: type[ModelError], words: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(kind, match=words):
        read_header(path)

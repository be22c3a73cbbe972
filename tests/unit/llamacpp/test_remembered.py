"""A finding is gone by while nothing that it went by is another, and not a moment longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import superfluid_adapter_llamacpp
from superfluid_adapter_llamacpp.contracts import contracts
from superfluid_adapter_llamacpp.probe import examine, recall, record
from superfluid_compat.errors import RuntimeBroken
from support.llama_standin import build

SEVEN = contracts()[7]
AGAIN = """
import sys
from pathlib import Path
from superfluid_adapter_llamacpp.probe import recall
recall(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """A library that serves, with a libggml beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "cache").mkdir()
    build(tmp_path / "lib" / "libggml-cpu.so", contract=SEVEN)
    path = build(tmp_path / "lib" / "libllama.so", contract=SEVEN, sings=True)
    assert examine(path, tmp_path / "cache").reason is None
    recall(path, tmp_path / "cache")
    return path


def remembered(path: Path) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(record(path, cache(path)).read_bytes())
    return found


def cache(path: Path) -> Path:
    return path.parents[1] / "cache"


def later(path: Path) -> None:
    modified = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(modified, modified))


def longer(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("name", ["libllama.so", "libggml-cpu.so"])
@pytest.mark.parametrize("change", [later, longer, Path.unlink])
def test_each_file_counts_by_size_and_by_time(
    change: Callable[[Path], None], name: str, judged: Path
) -> None:
    before = remembered(judged)
    change(judged.with_name(name))
    wanted = "is out of reach" if change is Path.unlink else "has changed"
    with pytest.raises(RuntimeBroken, match=f"{name} {wanted}"):
        recall(judged, cache(judged))
    if change is not Path.unlink or name != "libllama.so":
        assert examine(judged, cache(judged)).reason is None
        recall(judged, cache(judged))
        assert remembered(judged) != before


def test_the_library_counts_by_its_bytes_too(judged: Path) -> None:
    stat, data = judged.stat(), bytearray(judged.read_bytes())
    at = data.index(b"a stand-in")
    data[at] = ord("A")
    judged.write_bytes(data)
    os.utime(judged, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    words = [sys.executable, "-c", AGAIN, str(judged), str(cache(judged))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert f"RuntimeBroken: {judged} has changed since" in done.stderr


def test_a_libggml_that_came_later_counts(judged: Path) -> None:
    added = build(judged.with_name("libggml-new.so"), contract=SEVEN)
    assert str(added) in examine(judged, cache(judged)).files
    assert str(added) in recall(judged, cache(judged)).files


def test_a_link_counts_by_what_it_means(judged: Path, tmp_path: Path) -> None:
    link = tmp_path / "lib" / "libllama-link.so"
    link.symlink_to(judged)
    assert examine(link, cache(judged)).reason is None
    other = build(tmp_path / "lib" / "libllama-other.so", contract=SEVEN, without=["llama_decode"])
    link.unlink()
    link.symlink_to(other)
    assert examine(link, cache(judged)).reason == "not-llama"


def test_what_older_code_found_is_forgotten(judged: Path) -> None:
    kept = remembered(judged)
    package = Path(superfluid_adapter_llamacpp.__file__).parent
    newest = max(one.stat().st_mtime_ns for one in package.iterdir() if one.is_file())
    assert kept["code"] == newest
    kept["code"] = newest - 1
    record(judged, cache(judged)).write_bytes(msgspec.json.encode(kept))
    with pytest.raises(RuntimeBroken, match="was not judged before"):
        recall(judged, cache(judged))

"""Which file of a folder is taken for llama.cpp: nothing is loaded here unless it says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp import search
from superfluid_adapter_llamacpp.library import NotLoadable, companions, family, find
from superfluid_adapter_llamacpp.probe import examine
from superfluid_adapter_llamacpp.recipes import finish
from superfluid_adapter_llamacpp.search import SeveralFound, library_in
from superfluid_compat.errors import RuntimeBroken
from superfluid_workerd.adapter import InstallPlan
from support.llama_libraries import INSTALLED, library


def put(folder: Path, *names: str) -> None:
    """Files that differ; `a -> b` is a link named a."""
    for given in names:
        name, _, target = given.partition(" -> ")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target) if target else path.write_text(name)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["libllama.so"], "libllama.so"),
        (["lib/libllama.so", "lib/libggml.so"], "lib/libllama.so"),
        (["llama_cpp/lib/libllama.so", "llama_cpp/__init__.py"], "llama_cpp/lib/libllama.so"),
        (["build/bin/libllama.so", "build/bin/libggml.so"], "build/bin/libllama.so"),
        (["llama-b9/build/bin/libllama.dylib"], "llama-b9/build/bin/libllama.dylib"),
        (
            ["lib/python3.11/site-packages/llama_cpp/lib/libllama.so"],
            "lib/python3.11/site-packages/llama_cpp/lib/libllama.so",
        ),
        (["x/xllamacpp.abi3.so", "x.libs/libgomp.so"], "x/xllamacpp.abi3.so"),
        (["a/libllama.so", "b/xllamacpp.abi3.so", "c/llama_more.so"], "a/libllama.so"),
        (["bin/libllama.so", "bin/libllama-common.so", "bin/libllama.so.0"], "bin/libllama.so"),
        (["x/libllama-1a2b3c4d.so.0", "y/libllama-common.so"], "x/libllama-1a2b3c4d.so.0"),
        (["libllama.so", "build/bin/libllama.so"], "libllama.so"),
        (["b/libllama.dylib", "b/libllama.dylib.dSYM/x/libllama.dylib"], "b/libllama.dylib"),
    ],
)  # fmt: skip
def test_the_usual_places_are_searched(names: list[str], taken: str, tmp_path: Path) -> None:
    put(tmp_path, *names)
    assert find(tmp_path) == tmp_path / taken


@pytest.mark.parametrize(
    "names",
    [
        ["bin/libllama.so.0.1", "bin/libllama.so.0 -> libllama.so.0.1"],
        ["build/bin/libllama.so", "lib/libllama.so -> ../build/bin/libllama.so"],
        ["build/bin/libllama.so", "build/latest -> bin"],
    ],
)
def test_several_names_of_one_file_are_one(names: list[str], tmp_path: Path) -> None:
    put(tmp_path, *names)
    assert find(tmp_path).samefile(tmp_path / names[0])


def test_hard_links_are_one_file(tmp_path: Path) -> None:
    put(tmp_path, "a/libllama.so", "b/x")
    os.link(tmp_path / "a/libllama.so", tmp_path / "b/libllama.so")
    assert find(tmp_path) == tmp_path / "a/libllama.so"


def test_those_that_differ_are_named_and_none_is_taken(tmp_path: Path) -> None:
    put(tmp_path, "build/bin/libllama.so", "build-cuda/bin/libllama.so")
    found = examine(tmp_path)
    assert found.reason == "cannot-load"
    both = "2 libraries that differ: build/bin/libllama.so, build-cuda/bin/libllama.so"
    assert both in found.sentence
    assert "name llama.cpp's library file or its folder" in found.fix
    with pytest.raises(RuntimeBroken, match="2 libraries that differ") as refused:
        finish(InstallPlan(version="b1"), tmp_path)
    assert refused.value.fix == "give the folder of one of them"


def test_of_many_that_differ_some_are_named(tmp_path: Path) -> None:
    put(tmp_path, *(f"{number}/libllama.so" for number in range(9)))
    with pytest.raises(SeveralFound, match=r"9 .*: 0/libllama.so, .*, 3/libllama.so and 5 more$"):
        library_in(tmp_path)


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    put(tmp_path, "other/bin/libllama.so")
    folder = tmp_path / "given"
    put(folder, "build -> ../other", "lib/libllama.so -> ../../other/bin/libllama.so", "gone/x")
    put(folder, "gone/libllama.so -> nothing", "loop/libllama.so -> libllama.so")
    with pytest.raises(NotLoadable, match=r"no libllama lies: .*lib/libllama.so are links out of"):
        find(folder)
    put(folder, "own/libllama.so")
    assert find(folder) == folder / "own/libllama.so"


def test_a_link_to_the_folder_itself_is_the_folder(tmp_path: Path) -> None:
    put(tmp_path, "build/bin/libllama.so", "latest -> build")
    assert find(tmp_path / "latest") == tmp_path / "latest/bin/libllama.so"


def test_what_lies_deeper_than_libraries_do_is_not_looked_for(tmp_path: Path) -> None:
    put(tmp_path, "/".join(["x"] * (search.DEEPEST + 1)) + "/libllama.so")
    with pytest.raises(NotLoadable, match="a folder in which no libllama lies"):
        find(tmp_path)
    assert find(tmp_path / "x").name == "libllama.so"


def test_a_folder_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_ENTRIES", 30)
    put(tmp_path, "a/libllama.so", *(f"b/{number}" for number in range(28)))
    with pytest.raises(NotLoadable, match="a folder of more than 30 files to look at"):
        find(tmp_path)
    put(tmp_path, "libllama.so")
    assert find(tmp_path) == tmp_path / "libllama.so"


def test_a_library_that_lies_deep_keeps_what_lies_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "build" / "bin"
    put(folder, "libgomp.so.1", "libggml-cpu-x.so")
    put(tmp_path, "checkout/libggml.so")
    own = Path(shutil.copy(library(INSTALLED), folder / "libllama.so"))
    found = find(tmp_path / "checkout")
    assert family(found) == [folder / "libgomp.so.1", own]
    assert companions(found) == [folder / "libggml-cpu-x.so", own]


def test_a_library_that_lies_deep_is_judged(tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "build" / "bin"
    folder.mkdir(parents=True)
    shutil.copy(library(INSTALLED), folder / "libllama.so")
    found = examine(tmp_path / "checkout")
    assert (found.path, found.reason) == (str(folder / "libllama.so"), None)

"""Which rights follow from where a model lies and what an adapter declares."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from superfluid.catalog.workerd import Place, Workerd
from superfluid.supervisor import cgroups, confine, memory
from superfluid_workerd.link.answers import Rights as Declared


def test_a_model_in_parts_brings_its_parts_and_nothing_else(tmp_path: Path) -> None:
    names = [f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    for name in (*names, "other-00001-of-00003.gguf", "m.gguf", "m-00001-of-00004.gguf"):
        (tmp_path / name).touch()
    assert confine.model_paths(tmp_path / names[1]) == [str(tmp_path / names[1])] + [
        str(tmp_path / name) for name in (names[0], names[2])
    ]
    assert confine.model_paths(tmp_path / "m.gguf") == [str(tmp_path / "m.gguf")]


def test_a_part_that_is_a_link_elsewhere_is_no_part(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").touch()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").touch()
    (tmp_path / "m-00002-of-00002.gguf").symlink_to(tmp_path / "secret" / "key")
    found = confine.model_paths(tmp_path / "m-00001-of-00002.gguf")
    assert found == [str(tmp_path / "m-00001-of-00002.gguf")]


def test_parts_that_a_hub_keeps_under_other_names_are_parts(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    targets = [blobs / "aa", blobs / "bb", tmp_path / "key"]
    for target in targets:
        target.touch()
    links = [snapshot / f"m-{n:05}-of-00004.gguf" for n in (1, 2, 3, 4)]
    for link, target in zip(links, [*targets, links[3]], strict=True):
        link.symlink_to(os.path.relpath(target, snapshot))
    assert confine.opened(links[0]) == links[0]
    assert confine.model_paths(links[0]) == [str(blobs / "aa"), str(blobs / "bb")]


def test_a_hub_snapshot_brings_its_own_blobs_alone(tmp_path: Path) -> None:
    model, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = model / "snapshots" / "1234"
    for folder in (snapshot, model / "blobs", other / "blobs"):
        folder.mkdir(parents=True)
    for blob in (model / "blobs" / "aa", other / "blobs" / "bb"):
        blob.touch()
    (snapshot / "config.json").symlink_to(model / "blobs" / "aa")
    (snapshot / "weights").symlink_to(other / "blobs" / "bb")
    (snapshot / "passwd").symlink_to("/etc/passwd")
    found = confine.model_paths(snapshot)
    assert found == [str(snapshot), str(model / "blobs" / "aa")]


def test_a_linked_model_is_what_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "alias.gguf").symlink_to(tmp_path / "real")
    assert confine.model_paths(tmp_path / "alias.gguf") == [str(tmp_path / "real")]


def test_who_can_read_by_mode(tmp_path: Path) -> None:
    nobody = 65534
    file = tmp_path / "file"
    file.touch(mode=0o644)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "file").touch(mode=0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    assert confine.can_read(file, nobody, nobody)
    assert not confine.can_read(closed / "file", nobody, nobody)
    file.chmod(0o600)
    assert not confine.can_read(file, nobody, nobody)
    assert confine.can_read(file, file.stat().st_uid, nobody)
    assert not confine.can_read(tmp_path / "none", nobody, nobody)


def test_what_an_adapter_declares_is_granted_and_memory_is_bounded(tmp_path: Path) -> None:
    declared = Declared(read=("/opt/engine",), devices=("/dev/gpu0",), spawn=True)
    rights = confine.rights("auto", declared, tmp_path / "m", [tmp_path], memory_budget=1 << 30)
    assert set(rights.read) == {str(tmp_path / "m"), str(tmp_path), "/opt/engine"}
    assert (rights.devices, rights.spawn, rights.write) == (("/dev/gpu0",), True, ())
    assert rights.data_bytes == 3 << 30
    assert rights.file_bytes == confine.FILE_BYTES


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"kernel": 3}, {"kernel": 3}, ""),
        ({"kernel": 3}, {"kernel": 4}, "kernel counted 1 killed for memory"),
        ({}, {"kernel": 4}, ""),
        ({"cgroup /a": 0, "kernel": 0}, {"cgroup /a": 2, "kernel": 2},
         "cgroup /a counted 2 killed for memory; kernel counted 2 killed for memory"),
    ],
)  # fmt: skip
def test_evidence_of_a_kill_for_memory(
    before: dict[str, int], after: dict[str, int], words: str
) -> None:
    assert memory.evidence(before, after) == words


@pytest.mark.parametrize("layout", ["v1", "v2", "hybrid", "container of v1", "container of v2"])
def test_kills_are_read_where_this_cgroup_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    own, place = {
        "v1": ("9:name=systemd:/\n4:memory:/a/b\n0::/\n", "memory/a/b/memory.oom_control"),
        "v2": ("0::/a/b\n", "a/b/memory.events"),
        "hybrid": ("1:cpu:/\n0::/a/b\n", "unified/a/b/memory.events"),
        "container of v1": ("4:memory:/a/b\n", "memory/memory.oom_control"),
        "container of v2": ("0::/a/b\n", "memory.events"),
    }[layout]
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("low 0\noom 5\noom_kill 2\n")
    (tmp_path / "own").write_text(own)
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "_VMSTAT", tmp_path / "vmstat")
    assert memory.kills() == {f"cgroup {(tmp_path / place).parent}": 2, "kernel": 7}


async def test_what_reads_a_header_gets_rights_too(tmp_path: Path) -> None:
    echo = tmp_path / "echo.py"
    echo.write_text("import os, sys\nprint(os.read(int(sys.argv[-1]), 1 << 20).decode())\n")
    place = Place(folder=tmp_path / "install")
    (tmp_path / "m").touch()
    told = await Workerd((sys.executable, str(echo))).ask(
        "fake",
        ["facts", "m"],
        dict[str, object],
        place=place,
        timeout_s=30,
        model=tmp_path / "m",
        readable=[tmp_path / "library.so"],
    )
    read = told["read"]
    assert isinstance(read, list)
    assert {str(tmp_path / name) for name in ("m", "install", "library.so")} < set(read)
    assert any("superfluid_adapter_fake" in path for path in read)
    assert (told["level"], told["write"], told["devices"]) == ("auto", [], [])

"""What memory control groups and ulimits leave, from trees of files like the kernel's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from superfluid_workerd.limits import available_bytes, cores, groups_left
from superfluid_workerd.options import MOST_THREADS

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def left(tmp_path: Path, lines: str) -> list[int]:
    process = tmp_path / "proc"
    process.mkdir(exist_ok=True)
    (process / "cgroup").write_text(lines)
    return list(groups_left(process, tmp_path / "cgroup"))


def test_version_2_counts_every_group_above_and_idle_page_cache_as_free(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root)
    group(root / "a", memory__max=900 * MIB, memory__current=500 * MIB, memory__stat="anon 5")
    stat = f"anon 1\ninactive_file {50 * MIB}\nactive_file 7"
    group(root / "a/b", memory__max=300 * MIB, memory__current=200 * MIB, memory__stat=stat)
    group(root / "a/b/c", memory__max="max", memory__current=100 * MIB)
    assert sorted(left(tmp_path, "0::/a/b/c\n")) == [150 * MIB, 400 * MIB]


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    group(root, memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=1)
    group(
        root / "x",
        memory__limit_in_bytes=200 * MIB,
        memory__usage_in_bytes=150 * MIB,
        memory__stat=f"inactive_file 3\ntotal_inactive_file {10 * MIB}",
    )
    assert left(tmp_path, "5:cpu:/y\n4:memory,hugetlb:/x\n0::/\n") == [60 * MIB]


def test_inside_a_container_the_mount_is_the_group_itself(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", memory__max=300 * MIB, memory__current=100 * MIB)
    assert left(tmp_path, "0::/docker/0123\n") == [200 * MIB]


def test_what_is_missing_bounds_nothing(tmp_path: Path) -> None:
    assert left(tmp_path, "0::/a\n") == []
    assert list(groups_left(tmp_path / "none", tmp_path)) == []


def test_here_it_is_at_most_what_the_machine_can_give() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_ulimit_bounds_it(limit: str) -> None:
    program = f"""
import json, resource
from superfluid_workerd.limits import available_bytes
before = available_bytes()
resource.setrlimit(resource.{limit}, ({600 * MIB}, resource.RLIM_INFINITY))
print(json.dumps([before, available_bytes()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    before, bounded = json.loads(done.stdout)
    assert 0 < bounded < min(before, 600 * MIB)


def test_a_large_machine_s_cores_are_no_more_than_threads_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found, wanted in ((range(6), 6), (range(768), MOST_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, it=found: set(it), raising=False)
        assert cores() == wanted

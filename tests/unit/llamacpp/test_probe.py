"""Every kind of library gets its verdict by evidence, and none takes the asking process with it."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from superfluid_adapter_llamacpp import adapter, probe
from superfluid_adapter_llamacpp.contained import ask
from superfluid_adapter_llamacpp.contracts import contracts
from superfluid_adapter_llamacpp.evidence import present_glibc
from superfluid_adapter_llamacpp.probe import Finding, examine, recall
from superfluid_compat.errors import RuntimeBroken
from superfluid_compat.verdicts import Rule, State
from superfluid_workerd.registry import checked_options
from support.llama_libraries import BUILDS, INSTALLED, library
from support.llama_standin import build

SEVEN = contracts()[7]


@pytest.mark.parametrize(
    ("name", "contract"), [(INSTALLED, 7), ("b11549", 8), ("b10229", 5), ("b9713", 4)]
)
def test_a_build_of_a_served_contract_is_recognised(name: str, contract: int) -> None:
    found = examine(library(name))
    assert (found.contract, found.reason) == (contract, None)
    assert (found.version, found.tested) == (name, True)
    assert [device.kind for device in found.devices] == ["cpu"]


def test_an_older_contract_is_refused_by_number() -> None:
    found = examine(library("b8672"))
    assert found.reason == "number-differs"
    assert found.contract == BUILDS["b8672"].contract
    assert "is of contract 1, wanted" in found.sentence
    assert found.judgement.state is State.REFUSED


# Files that no loader should see. Each is a copy of a real library with some bytes changed.


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(library(INSTALLED), tmp_path / "libllama.so"))


def replaced(path: Path, old: bytes, new: bytes) -> Path:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


def test_a_newer_glibc_is_named_with_the_one_that_is_here(copy: Path) -> None:
    found = examine(replaced(copy, b"\0GLIBC_2.17\0", b"\0GLIBC_9.17\0"))
    present = ".".join(map(str, present_glibc()))
    assert found.reason == "cannot-load"
    assert f"needs glibc 9.17, this machine has {present}" in found.sentence


def test_a_dependency_that_is_nowhere_is_named(copy: Path) -> None:
    found = examine(replaced(copy, b"\0libgomp.so.1\0", b"\0libgomq.so.1\0"))
    assert found.reason == "cannot-load"
    assert "needs libgomq.so.1, which is neither beside it nor in the system" in found.sentence


def test_another_machine_is_named(copy: Path) -> None:
    with copy.open("r+b") as file:
        file.seek(18)
        file.write((243).to_bytes(2, "little"))
    found = examine(copy)
    assert found.reason == "cannot-load"
    assert "is for riscv64, this machine is" in found.sentence


@pytest.mark.parametrize(
    "content", [b"no library at all\n", b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(100)]
)
def test_what_is_no_library_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libllama.so"
    path.write_bytes(content)
    found = examine(path)
    assert found.reason == "cannot-load"
    assert "a shared library was wanted" in found.sentence


def test_a_path_with_nothing_and_a_folder_without_a_library_are_said(tmp_path: Path) -> None:
    assert "there is no such file" in examine(tmp_path / "none.so").sentence
    assert "a folder in which no libllama lies" in examine(tmp_path).sentence


# Stand-ins: every symbol is there, something else is not as it should be.


def test_all_missing_functions_are_named_at_once(tmp_path: Path) -> None:
    lacking = ["llama_decode", "llama_get_sampled_token_ith"]
    found = examine(build(tmp_path / "libllama.so", contract=SEVEN, without=lacking))
    assert found.reason == "not-llama"
    assert all(name in found.sentence for name in lacking)


def test_other_defaults_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    changed = {"n_ubatch": 513.0}
    newest = contracts()[max(contracts())]
    found = examine(build(tmp_path / "libllama.so", contract=newest, context=changed))
    assert (found.reason, found.judgement.state) == ("unknown-abi", State.REFUSED)
    assert "n_ubatch reads 513, wanted 512" in found.sentence


def test_a_struct_of_another_size_is_refused_by_its_end(tmp_path: Path) -> None:
    newest = contracts()[max(contracts())]
    size = newest.context.size + 8
    found = examine(build(tmp_path / "libllama.so", contract=newest, context_size=size))
    assert found.reason == "unknown-abi"
    assert f"context defaults end at byte {size}, wanted {newest.context.size}" in found.sentence


def test_right_defaults_are_not_enough(tmp_path: Path) -> None:
    found = examine(build(tmp_path / "libllama.so", contract=SEVEN))
    assert (found.contract, found.reason) == (7, "canary-failed")
    assert found.sentence.endswith("but not its behaviour: a model does not load")
    assert found.judgement.state is State.BROKEN


def test_no_device_is_its_own_reason(tmp_path: Path) -> None:
    found = examine(build(tmp_path / "libllama.so", contract=SEVEN, devices=0))
    assert found.reason == "no-device"


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGILL", "SIGABRT"])
def test_a_library_that_dies_is_a_verdict(tmp_path: Path, signal: str) -> None:
    found = examine(build(tmp_path / "libllama.so", contract=SEVEN, at_load=f"raise({signal});"))
    assert found.reason == "cannot-load"
    assert f"died by {signal} while it loaded" in found.sentence


def test_a_library_that_hangs_is_a_verdict(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load="for (;;) pause();")
    found = examine(path, limit_s=8.0)
    assert found.reason == "cannot-load"
    assert "did not answer for 8 s while it loaded" in found.sentence


# What is remembered.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The children that are started from now on."""
    calls: list[Any] = []

    def counting(words: Any, limit_s: float) -> Any:
        calls.append(words)
        return ask(words, limit_s)

    monkeypatch.setattr(probe, "ask", counting)
    return calls


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_a_finding_is_remembered_until_the_file_changes(
    copy: Path, cache: Path, started: list[Any]
) -> None:
    first = examine(copy, cache)
    asked = len(started)
    assert examine(copy, cache) == first == recall(copy, cache)
    assert len(started) == asked
    build(copy, contract=SEVEN, without=["llama_decode"])
    with pytest.raises(RuntimeBroken, match=r"libllama\.so has changed since"):
        recall(copy, cache)
    assert examine(copy, cache).reason == "not-llama"


def test_a_damaged_memory_is_no_memory(copy: Path, cache: Path) -> None:
    first = examine(copy, cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(b"{")
    with pytest.raises(RuntimeBroken, match="was not judged before"):
        recall(copy, cache)
    assert examine(copy, cache) == first


@pytest.mark.parametrize("at_load", ["for (;;) pause();", "raise(SIGSEGV);", "_exit(0);"])
def test_a_failure_is_over_when_its_cause_is(at_load: str, tmp_path: Path, cache: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load=at_load)
    assert examine(path, cache, limit_s=1.0).reason == "cannot-load"
    assert list(cache.iterdir()) == []


def test_a_dependency_that_comes_later_is_found(copy: Path, cache: Path) -> None:
    replaced(copy, b"\0libgomp.so.1\0", b"\0libgomq.so.1\0")
    assert examine(copy, cache).reason == "cannot-load"
    (gomp,) = {line.split()[-1] for line in maps() if "libgomp.so" in line}
    beside = copy.with_name("libgomq.so.1")
    beside.write_bytes(Path(gomp).read_bytes().replace(b"libgomp.so.1\0", b"libgomq.so.1\0"))
    found = examine(copy, cache)
    assert found.reason is None
    assert {str(copy), str(beside)} <= set(found.files)


def maps() -> list[str]:
    ctypes.CDLL("libgomp.so.1")
    return Path("/proc/self/maps").read_text().splitlines()


# What a library may do to whoever loads it.


def test_a_library_that_ends_the_process_is_named(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load="_exit(0);")
    assert f"{path} ended with code 0 while it loaded" in examine(path).sentence


def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    noise = 'printf("{\\"path\\":\\"x\\",\\"complete\\":true}\\n{"); fflush(stdout);'
    path = build(tmp_path / "libllama.so", contract=SEVEN, devices=0, at_load=noise)
    assert examine(path).reason == "no-device"


def test_nothing_is_left_of_what_a_library_starts(tmp_path: Path) -> None:
    sign = tmp_path / "pid"
    fork = (
        f'if (!fork()) {{ setsid(); if (!fork()) {{ FILE *f = fopen("{sign}", "w"); '
        'fprintf(f, "%d", getpid()); fclose(f); for (;;) pause(); } _exit(0); } int status; '
        f'wait(&status); while (access("{sign}", F_OK)) usleep(1000);'
    )
    path = build(tmp_path / "libllama.so", contract=SEVEN, devices=0, at_load=fork)
    assert examine(path).reason == "no-device"
    assert not psutil.pid_exists(int(sign.read_text()))


@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_pipe_is_no_library(named: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "libllama.so")
    found = examine(tmp_path / "libllama.so" if named == "file" else tmp_path)
    assert "no regular file" in found.sentence


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc/version", "/proc/self/mem"])
def test_what_has_no_size_is_no_library(path: str) -> None:
    assert examine(Path(path)).reason == "cannot-load"
    assert "a shared library was wanted" in examine(Path(path)).sentence


def test_modules_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "numpy", "superfluid_adapter_llamacpp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert examine(library(INSTALLED)).contract == 7


# The adapter's answer.


def test_nothing_installed_is_its_own_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUPERFLUID_LLAMA_LIB", raising=False)
    llama = adapter()
    found = llama.check(checked_options(llama, {}), tmp_path)
    assert (found.state, found.rule) == (State.NOT_INSTALLED, Rule.NOT_INSTALLED)
    assert "superfluid runtime install llamacpp" in found.fix


@pytest.mark.parametrize("way", ["option", "environment", "install"])
def test_a_library_is_named_in_three_ways(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUPERFLUID_LLAMA_LIB", raising=False)
    llama, given = adapter(), {}
    named = library(INSTALLED)
    match way:
        case "option":
            given = {"lib": str(named)}
        case "environment":
            monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", str(named))
        case _:
            llama.installed = named.parent
    found = llama.check(checked_options(llama, given), tmp_path)
    assert (found.abi, found.problem, found.tested) == (7, None, True)


def test_a_build_that_nobody_tested_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(path="libllama.so", contract=8, version="0.7.0")
    monkeypatch.setattr(probe, "examine", lambda named, cache: finding)
    llama = adapter()
    found = llama.check(checked_options(llama, {"lib": "libllama.so"}), tmp_path)
    assert (found.problem, found.tested) == (None, False)

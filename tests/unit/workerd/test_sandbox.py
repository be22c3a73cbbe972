"""The parts of the sandbox that are data: the filter as a program, the profile as text."""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter

import pytest

from superfluid_workerd.sandbox import Rights, landlock, macos, seccomp
from superfluid_workerd.sandbox.linux import STRICT_ABI
from superfluid_workerd.sandbox.seccomp import ALLOW, ARCHITECTURES, KILL, TABLE, program

PID = 4711
CLONE_THREAD, CLONE_VM, CLONE_NEWUSER = 0x10000, 0x100, 0x10000000


def judge(steps: list[seccomp.Instruction], architecture: int, number: int, *given: int) -> int:
    """What the kernel's machine would answer, by linux/filter.h."""
    arguments = (*given, *(0 for _ in range(6 - len(given))))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    accumulator, at = 0, 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x15:
                at += yes if accumulator == operand else no
            case 0x25:
                at += yes if accumulator > operand else no
            case 0x45:
                at += yes if accumulator & operand else no
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"code {code:#x}")


class Machine:
    def __init__(self, name: str, *, spawn: bool = False) -> None:
        self.name = name
        self.steps = program(name, PID, spawn=spawn)

    def __call__(self, call: str, *arguments: int) -> int | None:
        """The error a call gets, None when it is let through."""
        numbers = {getattr(rule, self.name) for rule in TABLE if rule.name == call}
        (number,) = numbers
        assert number is not None
        return self.number(number, *arguments)

    def number(self, number: int, *arguments: int) -> int | None:
        answer = judge(self.steps, ARCHITECTURES[self.name], number, *arguments)
        return None if answer == ALLOW else answer & 0xFFFF


both = pytest.mark.parametrize("name", sorted(ARCHITECTURES))


@both
def test_each_refused_call_is_refused_by_its_number(name: str) -> None:
    machine = Machine(name)
    for rule in TABLE:
        number = getattr(rule, name)
        if number is not None and not rule.cases:
            assert machine.number(number) == rule.error, rule.name


@both
def test_what_a_worker_lives_by_is_let_through(name: str) -> None:
    ordinary = {
        "x86_64": (0, 1, 3, 9, 10, 11, 12, 24, 28, 35, 39, 186, 202, 231, 318, 334),
        "aarch64": (63, 64, 57, 222, 226, 215, 214, 124, 233, 101, 172, 178, 98, 94, 278, 293),
    }
    machine = Machine(name)
    assert [machine.number(number) for number in ordinary[name]] == [None] * 16
    listed = {getattr(rule, name) for rule in TABLE}
    assert all(machine.number(n) is None for n in range(seccomp.NEWEST + 1) if n not in listed)


@both
def test_newer_calls_are_unknown_and_other_architectures_are_killed(name: str) -> None:
    machine = Machine(name)
    assert machine.number(seccomp.NEWEST + 1) == errno.ENOSYS
    x32 = 0x40000000
    assert machine.number(x32 | 101) == errno.ENOSYS
    i386 = 0x40000003
    assert judge(machine.steps, i386, 11) == KILL


@both
def test_signals_reach_nobody_else(name: str) -> None:
    machine = Machine(name)
    assert machine("kill", PID, 9) is None
    assert machine("tgkill", PID, PID + 1, 6) is None
    for other in (0, 1, PID + 1, (1 << 32) - 1):
        assert machine("kill", other, 9) == errno.EPERM
        assert machine("tgkill", other, other, 9) == errno.EPERM
    assert machine("prlimit64", 0) is None
    assert machine("prlimit64", PID) is None
    assert machine("prlimit64", PID + 1) == errno.EPERM


@both
def test_threads_are_let_through_and_processes_are_not(name: str) -> None:
    for spawn, error in ((False, errno.EPERM), (True, None)):
        machine = Machine(name, spawn=spawn)
        assert machine("clone", CLONE_THREAD | CLONE_VM) is None
        assert machine("clone", CLONE_VM | 17) == error
        assert machine("execve") == error
        assert machine("clone", CLONE_NEWUSER | CLONE_THREAD) == errno.EPERM
        assert machine("clone3") == errno.ENOSYS


@both
def test_no_file_becomes_set_id(name: str) -> None:
    machine = Machine(name)
    assert machine("fchmod", 3, 0o644) == errno.EPERM
    assert machine("openat", 0, 0, os.O_CREAT, 0o600) is None
    assert machine("openat", 0, 0, os.O_CREAT, 0o4755) == errno.EPERM
    assert machine("openat", 0, 0, os.O_RDONLY, 0o4755) is None


@both
def test_each_number_belongs_to_one_call(name: str) -> None:
    names = {(getattr(rule, name), rule.name) for rule in TABLE} - {(None, "")}
    counted = Counter(number for number, _ in names if number is not None)
    assert not [number for number, many in counted.items() if many > 1]


def test_landlock_rights_by_abi() -> None:
    assert landlock.file_rights(1) == (1 << 13) - 1
    assert landlock.file_rights(3) & landlock.TRUNCATE
    assert not landlock.file_rights(4) & landlock.IOCTL_DEV
    assert landlock.file_rights(99) == landlock.file_rights(5) == (1 << 16) - 1
    assert landlock.READ & landlock.EXECUTE == landlock.WRITE & landlock.EXECUTE == 0
    assert STRICT_ABI == 6


def test_rights_cross_the_descriptor_whole() -> None:
    rights = Rights(
        level="strict", read=("/m",), write=("/s",), devices=("/dev/x",), user=(1, 2), spawn=True
    )
    assert Rights.decode(rights.encode()) == rights
    for broken in (b"", b"[]", b'{"reed": []}'):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Rights.decode(broken)


def test_a_seatbelt_profile_of_the_same_rights() -> None:
    rights = Rights(read=('/models/a "b".gguf',), write=("/scratch",))
    lines = macos.profile(rights, iter(["/python"])).splitlines()
    assert lines[:2] == ["(version 1)", "(deny default)"]
    assert '(allow file-read* (subpath "/models/a \\"b\\".gguf"))' in lines
    assert '(allow file-read* (subpath "/python"))' in lines
    assert '(allow file-read* file-write* (subpath "/scratch"))' in lines
    assert lines[-1] == "(deny network*)"
    text = "\n".join(lines)
    assert "process-exec" not in text
    assert "iokit" not in text
    writable = [line for line in lines if "file-write*" in line]
    assert len(writable) == 1


def test_a_seatbelt_profile_widens_for_a_gpu_and_for_spawning_alone() -> None:
    text = macos.profile(Rights(devices=("metal",), spawn=True), iter([]))
    assert "(allow iokit-open)" in text
    assert "(allow process-exec)" in text

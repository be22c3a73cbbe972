"""What is short for now is tried again and what is wrong for good is not, each with its remedy."""

from __future__ import annotations

import errno
import os

import pytest

from superfluid.supervisor.shortage import not_started
from superfluid_compat.errors import RuntimeBroken, RuntimeUnavailable, WorkerGaveUp


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free disk space"),
        (errno.EDQUOT, "free disk space"),
        (errno.EMFILE, "limit of open files"),
        (errno.ENFILE, "limit of open files"),
        (errno.EAGAIN, "limit of processes"),
        (errno.ENOMEM, "--memory-budget"),
    ],
)
def test_what_is_short_may_be_there_again(number: int, remedy: str) -> None:
    found = not_started("m", OSError(number, os.strerror(number)), "reinstall it")
    assert isinstance(found, WorkerGaveUp)
    assert found.message == f"the worker of m could not be started: {os.strerror(number)}"
    assert found.fix is not None
    assert remedy in found.fix


def test_what_is_not_there_is_mended_by_the_runtimes_remedy() -> None:
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/opt/python")
    found = not_started("m", missing, "reinstall it")
    assert isinstance(found, RuntimeBroken)
    assert "/opt/python" in found.message
    assert found.fix == "reinstall it"


def test_an_unavailable_runtime_keeps_its_own_remedy() -> None:
    found = not_started("m", RuntimeUnavailable("it was removed", fix="do this"), "reinstall it")
    assert isinstance(found, RuntimeBroken)
    assert found.message == "the worker of m could not be started: it was removed"
    assert found.fix == "do this"


def test_an_error_that_nobody_foresaw_is_tried_again_and_told_by_its_type() -> None:
    found = not_started("m", KeyError("x"), "reinstall it")
    assert isinstance(found, WorkerGaveUp)
    assert "KeyError" in found.message

"""Fixtures that every test may ask for, and the rule that none is skipped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from superfluid.config import SERVE

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
"""The same examples in every run, however long the machine takes over one."""

ROOT = Path(__file__).resolve().parents[1]
TEST_HOME = ROOT / ".cache" / "test-home"


@pytest.fixture(scope="session", autouse=True)
def port_taken() -> Iterator[None]:
    """The default port, taken: two tests that leave it to `serve` would meet now and then, so one
    that does fails always."""
    with socket.socket() as listener:
        # Another run of these tests, or a server of whoever works here, does as well.
        with contextlib.suppress(OSError):
            default = next(option.default for option in SERVE if option.name == "port")
            listener.bind(("127.0.0.1", default))
            listener.listen()
        yield


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; for tests marked `model`.

    The product's own pull brings it once, into a home that stays between runs, unless
    SUPERFLUID_TEST_MODEL names the file.
    """
    named = os.environ.get("SUPERFLUID_TEST_MODEL")
    path = Path(named or _pulled())
    if not path.is_file():
        pytest.fail(f"there is no model file {path}; unset SUPERFLUID_TEST_MODEL to fetch it")
    return path


def _pulled() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "superfluid", "models", "pull", "gemma-3-270m"],
        env={**os.environ, "SUPERFLUID_HOME": str(TEST_HOME)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"the default model cannot be fetched: {done.stderr}")
    return done.stdout.strip()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that is skipped proves nothing: it fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter is not None else 0
    if (
        reporter is not None
        and skipped
        and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        reporter.write_line(f"\n{skipped} skipped, wanted none", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

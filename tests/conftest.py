"""Fixtures that every test may ask for, and the rule that none is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_HOME = ROOT / ".cache" / "test-home"


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

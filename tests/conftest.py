"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file, named by SUPERFLUID_TEST_MODEL; for tests marked `model`."""
    named = os.environ.get("SUPERFLUID_TEST_MODEL")
    if not named or not Path(named).is_file():
        pytest.fail("SUPERFLUID_TEST_MODEL names no file; set it to the default model's GGUF")
    return Path(named)

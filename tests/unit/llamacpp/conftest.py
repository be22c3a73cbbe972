"""What the tests of the llama.cpp runtime share.

A process holds one llama.cpp. It is the build that the other tests' oracle uses, unless
SUPERFLUID_TEST_LLAMA_BUILD names another: `test_builds.py` runs these tests again that way.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.llama_libraries import BUILD, library


@pytest.fixture(scope="session")
def lib() -> Path:
    """The library that this process may load."""
    return library(BUILD)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter's shared folder, with what was found of the library."""
    return tmp_path_factory.mktemp("shared")

"""What the native runtime's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled kernels, filled as tests need them."""
    return tmp_path_factory.mktemp("kernels")

"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.house import Open, houses


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Open]:
    async with houses(tmp_path) as make:
        yield make

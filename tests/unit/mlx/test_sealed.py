"""A compiler that cannot start: what a load finds, and what a step meets after it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from support.mlx_environments import GENERATIONS, answer


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_kernel_that_cannot_be_compiled_costs_a_second_try_and_no_more(
    generation: str, tmp_path: Path
) -> None:
    answer(generation, "write", str(tmp_path), "llama", cwd=tmp_path)
    found = answer(generation, "sealed", str(tmp_path / "llama"), cwd=tmp_path)
    assert found["apart"] < 1e-5
    if sys.platform == "linux" and shutil.which("g++"):
        assert "Failed to compile" in found["fault"]

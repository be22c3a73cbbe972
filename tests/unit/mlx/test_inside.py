"""Everything in `inside/`, under each environment's own Python: both generations keep one contract.

One process for each, since importing mlx-lm takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mlx_environments import GENERATIONS, inside

CHECKS = Path(__file__).parent / "inside"
_OPTIONS = (
    "-p", "pytest_timeout", "-p", "no:cacheprovider", "--timeout=120", "--noconftest", "-q",
    "-o", "python_files=check_*.py", "--import-mode=importlib", "-W", "error", "-rs", "--tb=short",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_both_generations_keep_the_contract(generation: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = (*_OPTIONS, "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(CHECKS))
    done = inside(generation, "pytest", str(CHECKS), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout, done.stdout

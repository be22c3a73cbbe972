"""Everything in `inside/`, under each environment's own Python: both generations keep one contract.

One process for each, since importing mlx-lm takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mlx_environments import VERSIONS, inside

CHECKS = Path(__file__).parent / "inside"
_OPTIONS = (
    "-p", "pytest_timeout", "-p", "no:cacheprovider", "--timeout=120", "--noconftest", "-q",
    "-o", "python_files=check_*.py", "--import-mode=importlib", "-W", "error", "-rs", "--tb=short",
)  # fmt: skip


_CORE = ("check_caches.py", "check_conformance.py")
_PARTS = {"meta": ("",), "plain": ("",), "first-plain": _CORE}
"""What is run of `inside/`; everything where it says nothing more."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_keeps_the_contract(version: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    parts = [str(CHECKS / part) for part in _PARTS[version]]
    options = (*_OPTIONS, "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(CHECKS))
    done = inside(version, "pytest", *parts, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout, done.stdout

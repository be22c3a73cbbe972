"""What is proven on one build holds on the others; each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.llama_libraries import BUILD, INSTALLED

HERE = Path(__file__).parent
ALL = [str(HERE / f"test_{name}.py") for name in ("conformance", "runtime", "parity")]
SOME = [
    str(HERE / "test_conformance.py"),
    "-k",
    "(TestRuntime and (plain or window)) or TestEmbedding",
]


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("build", "tests"),
    [("b11549", ALL), ("b10229", SOME), ("b9713", SOME)],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_the_runtime_is_the_same_on(build: str, tests: list[str], default_model: Path) -> None:
    assert BUILD == INSTALLED
    words = [sys.executable, "-m", "pytest", "-q", *tests]
    environment = {
        **os.environ,
        "SUPERFLUID_TEST_LLAMA_BUILD": build,
        "SUPERFLUID_TEST_MODEL": str(default_model),
    }
    done = subprocess.run(
        words, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

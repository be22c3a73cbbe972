"""What is proven on one build holds on the others; each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp.contracts import served
from support.llama_libraries import BUILD, BUILDS, INSTALLED

HERE = Path(__file__).parent
TESTS = [
    str(HERE / f"test_{name}.py")
    for name in ("conformance", "runtime", "bounds", "stretch", "parity")
]


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "build", [name for name, one in BUILDS.items() if one.contract in served()]
)
def test_the_runtime_is_the_same_on(build: str, default_model: Path) -> None:
    assert BUILD == INSTALLED
    words = [sys.executable, "-m", "pytest", "-q", *TESTS]
    environment = {
        **os.environ,
        "SUPERFLUID_TEST_LLAMA_BUILD": build,
        "SUPERFLUID_TEST_MODEL": str(default_model),
    }
    done = subprocess.run(
        words, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

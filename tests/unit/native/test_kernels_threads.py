"""Helper threads never hold anything up: dropped, closed or forked at any moment.

Each test is a process of its own that a deadline ends: a hang there is a failure here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from superfluid_adapter_native.kernels.warm import warm
from superfluid_adapter_native.quants.types import BY_NAME

DEADLINE_S = 150

START = """
import gc, os, random, sys, threading
from pathlib import Path
import numpy as np
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.quants.types import BY_NAME

folder = Path(sys.argv[1])
matrix = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
raw = matrix.view(np.uint8).reshape(-1)

def started(threads=3):
    return Kernels(threads=threads, exact=True, cache=folder)

def product(kernels, rows=3):
    x = np.ones((rows, 256), np.float32)
    weight = kernels.weight(BY_NAME["F32"], raw, (512, 256), resident=True)
    assert np.allclose(kernels.linear(x, weight), x @ matrix.T, atol=1e-3)

def helpers():
    return [one for one in threading.enumerate() if one.name.startswith("kernels-")]

def in_a_cycle(kernels):
    class Knot: pass
    knot = Knot()
    knot.knot, knot.kernels = knot, kernels
"""

DROPPED_UNDER_THE_COMPILERS_LOCK = """
from llvmlite.binding import ffi

kernels = started()
product(kernels)
in_a_cycle(kernels)
del kernels
ending = helpers()
assert len(ending) == 2
with ffi.lib._lock:
    gc.collect()
for one in ending:
    one.join()
"""

CLOSED_WHILE_OTHERS_RUN = """
kept, closed = started(), started(4)
product(kept), product(closed)
assert len(helpers()) == 5
closed.close()
assert len(helpers()) == 2
product(kept), product(closed)
closed.close()
kept.close()
assert not helpers()
product(kept)
"""

FORKED = """
kernels = started(4)
for _ in range(30):
    product(kernels)
    child = os.fork()
    if child == 0:
        product(kernels)
        kernels.close()
        del kernels
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    product(kernels)
kernels.close()
"""

LEFT_OPEN_AT_EXIT = """
kernels = started(4)
product(kernels)
"""

AT_RANDOM = """
rng = random.Random(5)
gc.set_threshold(50, 2, 2)
for _ in range(8):
    several = [started(rng.randint(1, 5)) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.randint(1, 150)):
        product(rng.choice(several), rng.randint(1, 9))
    for kernels in several:
        rng.choice((in_a_cycle, Kernels.close, lambda kernels: None))(kernels)
    several = kernels = None
gc.collect()
for one in helpers():
    one.join()
"""


@pytest.fixture(scope="module")
def folder(kernels: Path) -> Path:
    """Everything compiled, so that a process does nothing but run."""
    warm([BY_NAME["F32"]], exact=True, caches=(), folder=kernels)
    return kernels


@pytest.mark.parametrize(
    "program",
    [
        DROPPED_UNDER_THE_COMPILERS_LOCK,
        CLOSED_WHILE_OTHERS_RUN,
        FORKED,
        LEFT_OPEN_AT_EXIT,
        AT_RANDOM,
    ],
    ids=["dropped", "closed", "forked", "left open", "at random"],
)
def test_threads_come_and_go_without_a_hang(program: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + program, str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr

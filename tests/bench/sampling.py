"""Milliseconds to draw one token from a row of 262,144 logits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.rows import Bench, Row, alternate
from superfluid_workerd.link.frames import Sampling
from superfluid_workerd.sampling import Sampler

VOCABULARY = 262_144


def rows(bench: Bench) -> Iterator[Row]:
    """One row for each way to draw, over peaked logits (as real text has) and flat ones."""
    random = np.random.default_rng(1)
    flat = random.standard_normal(VOCABULARY).astype(np.float32)
    peaked = (6 * random.standard_normal(VOCABULARY)).astype(np.float32)
    cases = (
        ("greedy", peaked, Sampling(temperature=0)),
        ("plain", peaked, Sampling()),
        ("top-k 40", peaked, Sampling(top_k=40)),
        ("top-k 1000", peaked, Sampling(top_k=1000)),
        ("greedy, logprobs 20", peaked, Sampling(temperature=0, logprobs=20)),
        ("top-p 0.9, peaked", peaked, Sampling(top_p=0.9)),
        ("top-p 0.9, flat", flat, Sampling(top_p=0.9)),
        ("min-p 0.05", peaked, Sampling(min_p=0.05)),
        ("typical 0.9", peaked, Sampling(typical_p=0.9)),
        ("penalties", peaked, Sampling(temperature=0, repetition_penalty=1.1)),
    )
    calls = {
        name: partial(_draws, Sampler(sampling, VOCABULARY), row, 10 if bench.quick else 40)
        for name, row, sampling in cases
    }
    for name, samples in alternate(bench.rounds, calls).items():
        limited = name.startswith(("greedy", "top-k"))
        yield Row(
            name=name,
            unit="ms/row",
            samples=samples,
            wanted="1 ms or less" if limited else "",
            conditions={"vocabulary": VOCABULARY},
        )


def _draws(sampler: Sampler, row: NDArray[np.float32], count: int) -> float:
    history = list(range(1000))
    start = time.perf_counter()
    for position in range(count):
        sampler.draw(row, position, history)
    return (time.perf_counter() - start) / count * 1000

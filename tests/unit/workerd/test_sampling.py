"""Sampling against a slow reference, a textbook Philox, and chi-square."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from superfluid_compat.errors import Fault, InvalidField, NotFinite
from superfluid_workerd.link.frames import Sampling
from superfluid_workerd.sampling import Drawn, Sampler, uniform

Row = NDArray[np.float32]
MASK = (1 << 64) - 1


def philox(seed: int, position: int) -> float:
    """Philox4x64-10 as the paper writes it; NumPy's first block is that of counter + 1."""
    counter = [(position + 1) & MASK, 0, 0, 0]
    key = [seed & MASK, 0]
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 64) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return (counter[0] >> 11) * 2.0**-53


def softmax(values: list[float], temperature: float = 1.0) -> list[float]:
    peak = max(values)
    parts = [math.exp((value - peak) / temperature) for value in values]
    total = math.fsum(parts)
    return [part / total for part in parts]


def prefix(
    order: list[int], probability: dict[int, float], mass: float
) -> tuple[list[int], list[float]]:
    """The shortest prefix that holds `mass`, and the sums before and at its end."""
    before = total = 0.0
    for count, token in enumerate(order, 1):
        before, total = total, total + probability[token]
        if total >= mass:
            return order[:count], [before, total]
    return order, [before, total]


class Reference:
    """The whole chain in float64 with full sorts, and how near a decision was to a border."""

    def __init__(self, sampling: Sampling, row: Row, history: list[int]) -> None:
        self.sampling = sampling
        self.margin = math.inf
        self.values = [float(value) for value in row]
        for token, bias in sampling.logit_bias.items():
            self.values[token] += bias
        window = sampling.penalty_window
        recent = history[-window:] if window else []
        for token in set(recent):
            value, repeat = self.values[token], sampling.repetition_penalty
            value = value / repeat if value > 0 else value * repeat
            value -= sampling.presence_penalty
            value -= recent.count(token) * sampling.frequency_penalty
            self.values[token] = value
        self.kept = self._kept()

    def _sorted(self, kept: list[int]) -> list[int]:
        return sorted(kept, key=lambda token: (-self.values[token], token))

    def _probability(self, kept: list[int]) -> dict[int, float]:
        return dict(zip(kept, softmax([self.values[token] for token in kept]), strict=True))

    def _kept(self) -> list[int]:
        kept = self._sorted(list(range(len(self.values))))
        if self.sampling.top_k:
            kept = kept[: self.sampling.top_k]
        if self.sampling.typical_p < 1:
            probability = self._probability(kept)
            entropy = -math.fsum(p * math.log(p) for p in probability.values() if p)
            distance = {
                token: abs(-math.log(p) - entropy) if p else math.inf
                for token, p in probability.items()
            }
            order = sorted(kept, key=lambda token: (distance[token], token))
            chosen, sums = prefix(order, probability, self.sampling.typical_p)
            self._near(sums, self.sampling.typical_p)
            edges = sorted(distance[token] for token in kept)[len(chosen) - 1 : len(chosen) + 1]
            self.margin = min(self.margin, *(b - a for a, b in itertools.pairwise(edges)), math.inf)
            kept = self._sorted(chosen)
        if self.sampling.top_p < 1:
            probability = self._probability(kept)
            kept, sums = prefix(kept, probability, self.sampling.top_p)
            self._near(sums, self.sampling.top_p)
        if self.sampling.min_p > 0:
            probability = self._probability(kept)
            floor = self.sampling.min_p * max(probability.values())
            self._near(list(probability.values()), floor)
            kept = [token for token in kept if probability[token] >= floor]
        return sorted(kept)

    def _near(self, sums: list[float], border: float) -> None:
        self.margin = min(self.margin, *(abs(value - border) for value in sums))

    def token(self, u: float) -> int:
        if self.sampling.temperature == 0:
            return self._sorted(list(range(len(self.values))))[0]
        weights = softmax([self.values[token] for token in self.kept], self.sampling.temperature)
        total = 0.0
        for token, weight in zip(self.kept, weights, strict=True):
            total += weight
            if total > u:
                self._near([total - weight, total], u)
                return token
        raise AssertionError("u is past the sum")


settings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.001, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    penalty_window=st.sampled_from([0, 3, 64]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-5, 5, width=32), max_size=3),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(
    settings,
    st.integers(10, 300),
    st.floats(0.1, 6),
    st.integers(0, 2**32),
    st.integers(0, 10_000),
    st.lists(st.integers(0, 9), max_size=12),
)
def test_every_chain_agrees_with_the_reference(
    sampling: Sampling, size: int, spread: float, seed: int, position: int, history: list[int]
) -> None:
    row = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    kept = row.copy()
    drawn = Sampler(sampling, size).draw(row, position, history)
    reference = Reference(sampling, row, history)
    token = reference.token(philox(sampling.seed, position))
    assert drawn == Drawn(token) or reference.margin < 1e-5
    assert np.array_equal(row, kept)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"temperature": 0.005},
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"typical_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 500, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    ],
)
def test_large_vocabularies_agree_with_the_reference(choice: dict[str, Any], spread: float) -> None:
    size = 20_011
    row = (np.random.default_rng(7).standard_normal(size) * spread).astype(np.float32)
    row[::3] = -np.inf
    sampling = Sampling(seed=5, **choice)
    for position in range(3):
        drawn = Sampler(sampling, size).draw(row, position, [])
        reference = Reference(sampling, row, [])
        token = reference.token(uniform(5, position))
        assert drawn.token == token or reference.margin < 1e-6


def test_draws_are_philox_by_seed_and_position() -> None:
    places = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 5), (-1, 5), (-(2**63), 0), (42, 2**40)]
    assert [uniform(*place) for place in places] == [philox(*place) for place in places]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_golden_draws() -> None:
    """Fixed for good: a stream that resumes on another build must go on with these."""
    assert [uniform(0, i) for i in range(3)] == [
        0.011546754286331562,
        0.5023796042735054,
        0.25382274039248487,
    ]
    row = np.linspace(-2, 2, 1000, dtype=np.float32)
    sampler = Sampler(Sampling(seed=1234, top_p=0.9, temperature=0.8), 1000)
    assert [sampler.draw(row, i, []).token for i in range(6)] == [806, 904, 611, 799, 895, 669]


def chi_square(counts: NDArray[np.int64], probability: NDArray[np.float64]) -> float:
    expected = probability * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 12])
def test_frequencies_fit_the_distribution(temperature: float, top_k: int) -> None:
    row = np.linspace(-1, 1, 12, dtype=np.float32)
    sampler = Sampler(Sampling(seed=99, temperature=temperature, top_k=top_k), 12)
    tokens = [sampler.draw(row, i, []).token for i in range(20_000)]
    probability = np.array(softmax([float(value) for value in row], temperature))
    # 11 degrees of freedom: above 31.3 once in a thousand.
    assert chi_square(np.bincount(tokens, minlength=12), probability) < 31.3


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    grid = np.array([[uniform(seed, i) for i in range(100)] for seed in range(100)])
    for pairs in (grid[:, 1:] - grid[:, :-1], grid[1:] - grid[:-1]):
        counts, _ = np.histogram(pairs % 1.0, bins=10, range=(0, 1))
        assert chi_square(counts, np.full(10, 0.1)) < 27.9


def test_greedy_takes_the_lowest_of_equals() -> None:
    row = np.zeros(50, dtype=np.float32)
    row[[7, 30]] = 3
    assert Sampler(Sampling(temperature=0), 50).draw(row, 0, []).token == 7


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=6, max_size=6),
    bias=st.dictionaries(st.integers(0, 5), st.sampled_from([-2.0, -0.0, 0.0, 1.5]), max_size=4),
    banned=st.sets(st.integers(0, 5), max_size=3),
)
def test_greedy_takes_the_largest_after_the_bias(
    values: list[float], bias: dict[int, float], banned: set[int]
) -> None:
    row = np.array(values, dtype=np.float32)
    wanted = row.copy()
    for token, value in {**bias, **dict.fromkeys(banned, -math.inf)}.items():
        wanted[token] += np.float32(value)
    sampler = Sampler(Sampling(temperature=0, logit_bias=bias), 6, banned)
    assert sampler.draw(row, 0, []).token == int(wanted.argmax())
    np.testing.assert_array_equal(row, np.array(values, dtype=np.float32))


def test_banned_tokens_are_never_drawn() -> None:
    row = np.array([9, 0, 0, 0], dtype=np.float32)
    sampler = Sampler(Sampling(logit_bias={0: 50.0}), 4, banned=[0, 2])
    assert {sampler.draw(row, i, []).token for i in range(200)} == {1, 3}


def test_penalties_count_the_window_only() -> None:
    row = np.array([3, 2, 1], dtype=np.float32)
    sampler = Sampler(Sampling(temperature=0, presence_penalty=2, penalty_window=2), 3)
    assert sampler.draw(row, 0, [0, 2, 2]).token == 0
    assert sampler.draw(row, 0, [2, 0, 2]).token == 1


def test_logprobs_are_the_models_own() -> None:
    row = np.array([1, 3, -math.inf, 2], dtype=np.float32)
    sampling = Sampling(temperature=0, logprobs=20, logit_bias={0: 100.0})
    drawn = Sampler(sampling, 4).draw(row, 0, [])
    finite = softmax([1.0, 3.0, 2.0])
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(finite[0]), abs=1e-6)
    assert [entry.token for entry in drawn.top] == [1, 3, 0]
    wanted = [math.log(finite[i]) for i in (1, 2, 0)]
    assert [entry.logprob for entry in drawn.top] == pytest.approx(wanted, abs=1e-6)


def test_logprobs_without_alternatives_and_none_at_all() -> None:
    row = np.zeros(4, dtype=np.float32)
    drawn = Sampler(Sampling(logprobs=0), 4).draw(row, 0, [])
    assert drawn.logprob == pytest.approx(math.log(0.25))
    assert drawn.top == ()
    assert Sampler(Sampling(), 4).draw(row, 0, []).logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {}, {"top_k": 3}, {"logprobs": 2}])
def test_a_row_with_a_value_that_is_no_number_is_the_models(
    bad: float, choice: dict[str, Any]
) -> None:
    row = np.zeros(5000, dtype=np.float32)
    row[4321] = bad
    with pytest.raises(NotFinite, match="wanted a finite one") as raised:
        Sampler(Sampling(**choice), 5000).draw(row, 0, [])
    assert "again" not in raised.value.fix


def test_a_row_that_leaves_nothing_is_a_fault() -> None:
    with pytest.raises(NotFinite):
        Sampler(Sampling(), 3).draw(np.full(3, -np.inf, dtype=np.float32), 0, [])
    with pytest.raises(Fault, match="bans and penalties leave -inf"):
        Sampler(Sampling(), 3, banned=range(3)).draw(np.zeros(3, dtype=np.float32), 0, [])
    with pytest.raises(Fault, match=r"shape \(4,\)"):
        Sampler(Sampling(), 3).draw(np.zeros(4, dtype=np.float32), 0, [])


@pytest.mark.parametrize("token", [-1, 8])
def test_a_bias_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(InvalidField) as caught:
        Sampler(Sampling(logit_bias={token: 1.0}), 8)
    assert caught.value.param == "logit_bias"
    assert str(token) in caught.value.message


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    "choice", [{}, {"top_k": 2}, {"top_p": 1e-9}, {"typical_p": 1e-9}, {"min_p": 1.0}]
)
def test_extreme_settings_stay_finite(temperature: float, choice: dict[str, Any]) -> None:
    row = np.array([3e38, -3e38, 0, 2.9e38], dtype=np.float32)
    sampler = Sampler(Sampling(temperature=temperature, **choice), 4)
    assert sampler.draw(row, 0, []).token == 0

"""What every runtime that embeds promises, as tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from superfluid_compat.errors import OutOfBoundary, Unsupported
from superfluid_workerd.adapter import Embedding, Feed, Runtime, RuntimeDescription
from superfluid_workerd.conformance.case import Case

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

_UNIT: Final = 1e-4
"""How far a vector's length may be from 1."""


class _Abandon(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Embedder:
    """A runtime that embeds, and rows for it."""

    runtime: Runtime
    describe: RuntimeDescription
    embedding: Embedding

    def rows(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Token ids that look like nothing in particular, the same for a seed."""
        drawn = np.random.default_rng(seed)
        return [
            [int(token) for token in drawn.integers(0, self.describe.vocabulary, length)]
            for length in lengths
        ]

    def embed(self, rows: Sequence[Sequence[int]]) -> Logits:
        return self.runtime.embed(rows, lambda: None)


@contextmanager
def _opened(case: Case) -> Iterator[_Embedder]:
    runtime = case.load().runtime
    try:
        describe = runtime.describe()
        assert describe.embedding is not None, "the case's model does not embed"
        yield _Embedder(runtime, describe, describe.embedding)
    finally:
        runtime.close()


class EmbeddingContract:
    """Needs a fixture `case` of type `Case` whose model embeds, inputs of 16 tokens or longer."""

    def test_the_description_says_what_it_embeds(self, case: Case) -> None:
        with _opened(case) as opened:
            embedding, describe = opened.embedding, opened.describe
            assert embedding.width >= 1
            assert 1 <= embedding.tokens <= embedding.batch_tokens
            assert embedding.tokens >= min(case.context, describe.context)
            assert describe.generates or embedding.tokens == describe.context
            assert opened.runtime.describe() == describe

    def test_each_row_gets_a_vector_of_length_1(self, case: Case) -> None:
        with _opened(case) as opened:
            vectors = opened.embed(opened.rows(3, 1, 9))
            assert vectors.dtype == np.float32
            assert vectors.shape == (3, opened.embedding.width)
            assert np.isfinite(vectors).all()
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=_UNIT)

    def test_equal_rows_get_equal_vectors_and_others_others(self, case: Case) -> None:
        with _opened(case) as opened:
            (one,), (other,) = opened.rows(6, seed=1), opened.rows(6, seed=2)
            first, second = opened.embed([one]), opened.embed([one])
            np.testing.assert_array_equal(first, second)
            together = opened.embed([one, other, one])
            _close(together[0], together[2], case)
            assert np.abs(together[0] - together[1]).max() > max(case.tolerance, _UNIT)

    @pytest.mark.parametrize("count", [1, 2, 7, 40])
    def test_a_row_gets_what_it_gets_alone_whatever_goes_with_it(
        self, case: Case, count: int
    ) -> None:
        with _opened(case) as opened:
            rows = opened.rows(*(1 + 5 * at % 8 for at in range(count)), seed=count)
            while sum(map(len, rows)) > opened.embedding.batch_tokens:
                rows.pop()
            for row, vector in zip(rows, opened.embed(rows), strict=True):
                _close(vector, opened.embed([row])[0], case)

    def test_the_longest_input_is_taken_and_a_longer_one_refused(self, case: Case) -> None:
        with _opened(case) as opened:
            (longest,) = opened.rows(opened.embedding.tokens)
            if len(longest) <= 4096:
                assert np.isfinite(opened.embed([longest])).all()
            _refused(opened, case, [*longest, 0])

    def test_a_row_without_tokens_and_unknown_ones_are_refused(self, case: Case) -> None:
        with _opened(case) as opened:
            for wrong in ([], [-1], [0, opened.describe.vocabulary], [1 << 40]):
                _refused(opened, case, wrong)

    def test_vectors_belong_to_the_caller(self, case: Case) -> None:
        with _opened(case) as opened:
            rows = opened.rows(4, 5)
            vectors = opened.embed(rows)
            kept = vectors.copy()
            opened.embed(opened.rows(4, 5, seed=9))
            np.testing.assert_array_equal(vectors, kept)
            vectors[:] = 0
            np.testing.assert_array_equal(opened.embed(rows), kept)

    def test_it_ticks_and_can_be_abandoned(self, case: Case) -> None:
        def abandon() -> None:
            raise _Abandon

        with _opened(case) as opened:
            rows = opened.rows(4, 2)
            expected = opened.embed(rows)
            with pytest.raises(_Abandon):
                opened.runtime.embed(opened.rows(3, 3, seed=4), abandon)
            np.testing.assert_array_equal(opened.embed(rows), expected)

    def test_what_gives_no_text_says_so_and_what_does_goes_on(self, case: Case) -> None:
        with _opened(case) as opened:
            runtime, (tokens,) = opened.runtime, opened.rows(5)
            if not opened.describe.generates:
                with pytest.raises(Unsupported):
                    runtime.seq_create()
                with pytest.raises(Unsupported):
                    runtime.step([Feed(0, tokens, 0)], lambda: None)
                return
            one, other = runtime.seq_create(), runtime.seq_create()
            runtime.step([Feed(one, tokens, 0), Feed(other, tokens, 0)], lambda: None)
            opened.embed(opened.rows(7))
            assert runtime.seq_length(one) == runtime.seq_length(other) == 5
            (row,) = runtime.step([Feed(one, tokens, 5)], lambda: None)
            assert row is not None
            kept = row.copy()
            (again,) = runtime.step([Feed(other, tokens, 5)], lambda: None)
            assert again is not None
            _close(again, kept, case)


def _refused(opened: _Embedder, case: Case, wrong: Sequence[int]) -> None:
    """The row is refused, nothing is computed of those beside it, and the next call is as ever."""
    rows = opened.rows(3, 4)
    expected = opened.embed(rows)
    with pytest.raises(OutOfBoundary):
        opened.embed([rows[0], wrong])
    _close(opened.embed(rows), expected, case)


def _close(found: Logits, wanted: Logits, case: Case) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=case.tolerance)

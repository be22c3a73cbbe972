"""What every tokenizer promises, as tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from superfluid_compat.errors import OutOfBoundary
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.conformance.case import Case


class TokenizerContract:
    """Needs a fixture `case` of type `Case`."""

    @pytest.fixture
    def tokenizer(self, case: Case) -> Tokenizer:
        return case.adapter.tokenizer(case.model, case.checked())

    def test_texts_come_back_as_they_were(self, case: Case, tokenizer: Tokenizer) -> None:
        for text in case.texts:
            assert tokenizer.decode(tokenizer.encode(text)).decode() == text
            plain = tokenizer.encode(text, add_special=False)
            assert tokenizer.decode(plain).decode() == text

    def test_ids_are_in_the_vocabulary(self, case: Case, tokenizer: Tokenizer) -> None:
        found = {token for text in case.texts for token in tokenizer.encode(text)}
        assert all(0 <= token < tokenizer.size for token in found)
        special = {tokenizer.bos, tokenizer.eos, *tokenizer.stops} - {None}
        assert all(token is not None and 0 <= token < tokenizer.size for token in special)

    def test_special_tokens_go_around_a_text_only_when_asked(
        self, case: Case, tokenizer: Tokenizer
    ) -> None:
        special = {tokenizer.bos, tokenizer.eos, *tokenizer.stops}
        for text in case.texts:
            assert not special & set(tokenizer.encode(text, add_special=False))

    def test_a_special_token_is_read_as_such_only_when_asked(self, tokenizer: Tokenizer) -> None:
        for token in tokenizer.stops:
            text = tokenizer.piece(token, special=True).decode()
            assert tokenizer.encode(text, add_special=False, special=True) == [token]
            assert token not in tokenizer.encode(text, add_special=False)
            assert tokenizer.piece(token) == b""

    def test_pieces_end_up_as_the_text(self, case: Case, tokenizer: Tokenizer) -> None:
        for text in case.texts:
            tokens = tokenizer.encode(text, add_special=False)
            pieces = b"".join(tokenizer.piece(token) for token in tokens)
            assert pieces.decode().lstrip(" ") == text.lstrip(" ")

    def test_every_id_has_a_piece_and_no_other(self, tokenizer: Tokenizer) -> None:
        for token in range(tokenizer.size):
            assert isinstance(tokenizer.piece(token, special=True), bytes)
        for token in (-1, tokenizer.size):
            with pytest.raises(OutOfBoundary):
                tokenizer.piece(token)
            with pytest.raises(OutOfBoundary):
                tokenizer.decode([token])

    def test_the_end_of_text_is_among_the_stops(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.eos is None or tokenizer.eos in tokenizer.stops

    def test_no_text_has_fewer_ids_than_its_bytes_allow(
        self, case: Case, tokenizer: Tokenizer
    ) -> None:
        longest = tokenizer.longest
        for text in (*case.texts, " " * 200, "\n" * 200, "a" * 999, "\0\x7f\xa0\u2028" * 9):
            tokens = tokenizer.encode(text, add_special=False, special=True)
            assert longest is None or len(text.encode()) <= longest * len(tokens)

    def test_threads_may_share_it(self, case: Case, tokenizer: Tokenizer) -> None:
        texts = [text * 20 for text in case.texts]
        expected = [tokenizer.encode(text) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            for _ in range(5):
                assert list(pool.map(tokenizer.encode, texts)) == expected

    def test_it_is_the_loaded_models_own(self, case: Case, tokenizer: Tokenizer) -> None:
        loaded = case.load()
        loaded.runtime.close()
        for text in case.texts:
            assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
        assert loaded.runtime.describe is not None
        assert loaded.tokenizer.stops == tokenizer.stops

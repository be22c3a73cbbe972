from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_workerd.prefix import BLOCK, PrefixIndex, common, extend


def _chain(tokens: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend(chain, tokens)
    return chain


def _tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_counts_what_both_begin_with(first: list[int], second: list[int]) -> None:
    same = common(first, second)
    assert first[:same] == second[:same]
    assert same == min(len(first), len(second)) or first[same] != second[same]


def test_a_chain_has_a_hash_for_each_whole_block_of_all_before_it() -> None:
    tokens = _tokens(0, 3 * BLOCK + 5)
    chain = _chain(tokens)
    assert len(chain) == 3
    assert _chain(tokens[:BLOCK]) == chain[:1]
    assert _chain([9, *tokens[1:]])[2] != chain[2]
    grown = chain[:1]
    extend(grown, tokens)
    assert grown == chain


def test_holders_come_with_the_blocks_in_common_the_most_first() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    base = _tokens(0, 4 * BLOCK)
    index.add("one", _chain(base[:BLOCK]))
    index.add("three", _chain(base[: 3 * BLOCK]))
    index.add("other", _chain(_tokens(7, 4 * BLOCK)))
    index.add("forks", _chain(base[: 2 * BLOCK] + _tokens(900, BLOCK)))
    assert list(index.sharing(_chain(base))) == [(3, "three"), (2, "forks"), (1, "one")]
    assert list(index.sharing(_chain(_tokens(50, BLOCK)))) == []
    assert list(index.sharing([])) == []


_LISTS = st.lists(st.lists(st.sampled_from([0, 1]), max_size=7), max_size=8)


@given(_LISTS, st.lists(st.sampled_from([0, 1]), max_size=7), st.sets(st.integers(0, 7)))
def test_an_index_equals_a_plain_search(
    held: list[list[int]], wanted: list[int], removed: set[int]
) -> None:
    def blocks(letters: list[int]) -> list[int]:
        return [letter for letter in letters for _ in range(BLOCK)]

    index: PrefixIndex[int] = PrefixIndex()
    for number, letters in enumerate(held):
        index.add(number, _chain(blocks(letters)))
    for number in removed & set(range(len(held))):
        index.remove(number, _chain(blocks(held[number])))
    expected = {
        number: shared
        for number, letters in enumerate(held)
        if number not in removed and (shared := common(letters, wanted))
    }
    found = list(index.sharing(_chain(blocks(wanted))))
    assert {number: depth for depth, number in found} == expected
    assert [depth for depth, _ in found] == sorted((d for d, _ in found), reverse=True)


def test_an_emptied_index_holds_nothing() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    chain = _chain(_tokens(0, 5 * BLOCK))
    index.add("a", chain)
    index.add("b", chain[:2])
    index.remove("a", chain)
    assert len(index) == 2
    index.remove("b", chain[:2])
    assert len(index) == 0
    with pytest.raises(KeyError):
        index.remove("b", chain[:2])

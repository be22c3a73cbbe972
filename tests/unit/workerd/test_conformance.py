"""The fake runtime keeps the contract, and broken ones are found out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from superfluid_adapter_fake.fake import FakeAdapter
from superfluid_adapter_fake.orders import Orders, write_model
from superfluid_adapter_fake.runtime import FakeRuntime, extend

from superfluid_compat.errors import ChatUnsupported
from superfluid_workerd.adapter import (
    Facts,
    Feed,
    LoadedModel,
    OpenRequest,
    RuntimeDescription,
    SequenceId,
    Tick,
)
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    EmbeddingContract,
    RuntimeContract,
    TokenizerContract,
)

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

KINDS = {
    "able": Orders(),
    "plain": Orders(copy=False, export=False, truncate="zero", step_tokens=16, context=48),
    "pooled": Orders(tokens=256, retry=True),
    "chatty": Orders(template="{{ messages[0].content }}", max_sequences=4),
}


@pytest.fixture(params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    model = write_model(tmp_path / "m.fake", KINDS[str(request.param)])
    folder = tmp_path / "shared"
    folder.mkdir()
    return Case(adapter=FakeAdapter(), model=model, folder=folder, lanes=4)


class TestAdapter(AdapterContract):
    pass


class TestRuntime(RuntimeContract):
    pass


class TestTokenizer(TokenizerContract):
    pass


class TestEmbedding(EmbeddingContract):
    @pytest.fixture(params=[True, False], ids=["beside-text", "alone"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        model = write_model(tmp_path / "m.fake", Orders(generates=request.param, context=48))
        return Case(adapter=FakeAdapter(), model=model, folder=tmp_path, lanes=4)


class TestEmbeddingAdapter(AdapterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        model = write_model(tmp_path / "m.fake", Orders(generates=False))
        folder = tmp_path / "shared"
        folder.mkdir()
        return Case(adapter=FakeAdapter(), model=model, folder=folder)


class Leaking(FakeRuntime):
    """Keeps what a sequence held when it is emptied."""

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        last = self._states(sequence)[-1]
        super().seq_truncate(sequence, length)
        if length == 0:
            self._states(sequence)[0] = last


class Reusing(FakeRuntime):
    """Gives every feed's rows in one buffer."""

    def __init__(self, orders: Orders, sequences: int) -> None:
        super().__init__(orders, sequences)
        self.buffer = np.zeros((64, 259), np.float32)

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        rows = super().step(feeds, tick)
        for row in rows:
            if row is not None:
                self.buffer[: len(row)] = row
        return [None if row is None else self.buffer[: len(row)] for row in rows]


class Mixing(FakeRuntime):
    """Lets the first of several seats see the second's tokens."""

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        if len(feeds) > 1:
            states = self._states(feeds[0].sequence)
            states[-1] = extend(states[-1], feeds[1].tokens[0])
        return super().step(feeds, tick)


class Trusting(FakeRuntime):
    """Takes any token."""

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        tame = [replace(it, tokens=[abs(token) % 259 for token in it.tokens]) for it in feeds]
        return super().step(tame, tick)


class Aliasing(FakeRuntime):
    """Copies by reference."""

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        copy = super().seq_copy(sequence, length)
        self._sequences[copy] = self._states(sequence)
        return copy


class Abandoning(FakeRuntime):
    """Makes the sequence of a copy before it looks whether there may be one."""

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        copy = self.seq_create()
        found = super().seq_copy(sequence, length)
        self.seq_free(copy)
        return found


class Forgetting(FakeRuntime):
    """Leaves behind what it made for a state that it then refuses."""

    def seq_import(self, payload: bytes) -> SequenceId:
        copy = self.seq_create()
        found = super().seq_import(payload)
        self.seq_free(copy)
        return found


class Overfull(FakeRuntime):
    """Tells a bound that it does not keep."""

    def describe(self) -> RuntimeDescription:
        return replace(super().describe(), tokens=64)


class Believing(FakeRuntime):
    """Imports whatever it is given."""

    def seq_import(self, payload: bytes) -> SequenceId:
        return self.seq_create() if len(payload) < 40 else super().seq_import(payload)


CAUGHT = {
    Leaking: "test_a_recycled_sequence_holds_nothing_of_its_last_stream",
    Reusing: "test_rows_are_apart_and_the_callers_to_write_on",
    Mixing: "test_the_order_of_seats_changes_nothing",
    Trusting: "test_tokens_outside_the_vocabulary_are_refused",
    Aliasing: "test_a_copy_goes_its_own_way_or_is_unsupported",
    Abandoning: "test_a_copy_of_a_part_is_that_part_or_refused_and_leaves_nothing",
    Forgetting: "test_what_is_no_state_leaves_no_sequence",
    Overfull: "test_a_bound_on_all_tokens_together_is_kept_and_costs_nobody",
    Believing: "test_a_sequence_moves_to_another_runtime_or_is_unsupported",
}


@pytest.mark.parametrize("broken", CAUGHT, ids=lambda it: it.__name__)
def test_a_runtime_that_breaks_the_contract_is_caught(
    broken: type[FakeRuntime], tmp_path: Path
) -> None:
    class Adapter(FakeAdapter):
        def open(self, request: OpenRequest) -> LoadedModel:
            return replace(super().open(request), runtime=broken(Orders(), request.lanes))

    model = write_model(tmp_path / "m.fake")
    case = Case(adapter=Adapter(), model=model, folder=tmp_path, lanes=4)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(RuntimeContract(), CAUGHT[broken])(case)


class Drifting(FakeRuntime):
    """Embeds a row by its place."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        return super().embed([[at % 200, *row] for at, row in enumerate(tokens)], tick)


class Unscaled(FakeRuntime):
    """Vectors of any length."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        return super().embed(tokens, tick) * np.float32(3)


class Cutting(FakeRuntime):
    """Embeds the beginning of what is too long."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        return super().embed([row[: self._orders.context] for row in tokens], tick)


class Lending(FakeRuntime):
    """Gives vectors of a buffer that the next call writes into."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        vectors = super().embed(tokens, tick)
        self.buffer = getattr(self, "buffer", np.zeros((999, vectors.shape[1]), np.float32))
        self.buffer[: len(vectors)] = vectors
        lent: Logits = self.buffer[: len(vectors)]
        return lent


class Still(FakeRuntime):
    """Never ticks while it embeds."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        return super().embed(tokens, lambda: None)


CAUGHT_EMBEDDING = {
    Drifting: "test_a_row_gets_what_it_gets_alone_whatever_goes_with_it",
    Unscaled: "test_each_row_gets_a_vector_of_length_1",
    Cutting: "test_the_longest_input_is_taken_and_a_longer_one_refused",
    Lending: "test_vectors_belong_to_the_caller",
    Still: "test_it_ticks_and_can_be_abandoned",
}


@pytest.mark.parametrize("broken", CAUGHT_EMBEDDING, ids=lambda it: it.__name__)
def test_a_runtime_that_embeds_wrongly_is_caught(broken: type[FakeRuntime], tmp_path: Path) -> None:
    class Adapter(FakeAdapter):
        def open(self, request: OpenRequest) -> LoadedModel:
            return replace(super().open(request), runtime=broken(Orders(), request.lanes))

    case = Case(adapter=Adapter(), model=write_model(tmp_path / "m.fake"), folder=tmp_path)
    test = CAUGHT_EMBEDDING[broken]
    arguments = (7,) if broken is Drifting else ()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(EmbeddingContract(), test)(case, *arguments)


class Lying(FakeAdapter):
    """Says of a model what a load does not find."""

    def __init__(self, **lie: Any) -> None:
        self.lie = lie

    def facts(self, model: Path) -> Facts:
        return msgspec.structs.replace(super().facts(model), **self.lie)


FACTS = "test_the_facts_are_what_a_load_finds"
CUT = "test_more_than_there_is_is_refused_or_given_and_never_cut"
BROKEN: dict[str, tuple[dict[str, Any], Orders, str, tuple[str, ...]]] = {
    "vocabulary": ({"vocabulary": 260}, Orders(), FACTS, ()),
    "more bytes than there are": ({"bytes": 1 << 40}, Orders(), FACTS, ()),
    "no bytes": ({"bytes": 0}, Orders(), FACTS, ()),
    "less context": ({"context": 255}, Orders(), FACTS, ()),
    "a template that is not there": ({"template": True}, Orders(), FACTS, ()),
    "no template where one is": ({"template": False}, Orders(template="x"), FACTS, ()),
    "a broken template": ({}, Orders(template="{% if %}"), "test_the_models_template_compiles", ()),
    "a context cut in silence": ({}, Orders(silent=True), CUT, ("context",)),
    "lanes cut in silence": ({}, Orders(silent=True, max_sequences=4), CUT, ("lanes",)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_that_breaks_the_contract_is_caught(kind: str, tmp_path: Path) -> None:
    lie, orders, test, arguments = BROKEN[kind]
    model = write_model(tmp_path / "m.fake", orders)
    case = Case(adapter=Lying(**lie), model=model, folder=tmp_path, lanes=4)
    with pytest.raises((AssertionError, ChatUnsupported)):
        getattr(AdapterContract(), test)(case, *arguments)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_an_adapter_that_loads_an_engine_at_once_is_caught(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hasty_{engine}"
    lines = (f"import {engine}", "from superfluid_adapter_fake.fake import FakeAdapter", "")
    code = "\n".join((*lines, "class Hasty(FakeAdapter): ...", ""))
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    hasty = importlib.import_module(name).Hasty()
    case = Case(adapter=hasty, model=write_model(tmp_path / "m.fake"), folder=tmp_path)
    with pytest.raises(AssertionError):
        AdapterContract().test_importing_it_loads_no_engine(case)

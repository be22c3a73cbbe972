"""Embedding requests in the turn loop and before it: whose they are, and what they cost others."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from superfluid_adapter_fake.orders import Orders
from superfluid_adapter_fake.runtime import FakeRuntime, vector_of
from superfluid_adapter_fake.tokenizer import BOS, VOCABULARY, ByteTokenizer

from superfluid_compat.errors import (
    BadFrame,
    Capacity,
    ContextLengthExceeded,
    EmbeddingsUnsupported,
    Fatal,
    Fault,
    GenerationUnsupported,
    InvalidField,
    Overloaded,
)
from superfluid_workerd.adapter import Embedding, Feed, Tick
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.embedding import EmbedJob
from superfluid_workerd.executor import Executor
from superfluid_workerd.intake import Intake
from superfluid_workerd.link.frames import (
    Cancel,
    Embed,
    Embedded,
    Generate,
    RequestFailed,
    Shutdown,
    StreamFailed,
    Text,
    ToDaemon,
    Tokens,
    Turn,
)
from superfluid_workerd.turns import Policy
from support.clock import Clock, held
from support.turn_loop import request

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

ORDERS = Orders(context=64, step_tokens=64)
Made = Callable[[Orders, int], FakeRuntime]


class Loop:
    """An executor over the fake, and what it answered. It ends when `wanted` answers have come."""

    def __init__(
        self, orders: Orders = ORDERS, policy: Policy | None = None, made: Made = FakeRuntime
    ) -> None:
        self.runtime = made(orders, 2)
        self.policy = policy or Policy()
        self.executor = Executor(self.runtime, 2, self.policy, self._hear)
        described = self.runtime.describe()
        tokenizer = ByteTokenizer()
        self.intake = Intake(
            tokenizer,
            ChatCodec(tokenizer, None),
            described.context,
            VOCABULARY,
            described.generates,
            described.embedding,
        )
        self.said: list[ToDaemon] = []
        self.wanted = 0

    def embed(self, number: int, *rows: Sequence[int], answered: bool = True) -> None:
        self.wanted += answered
        self.executor.embeddings.expect(number)
        inputs: list[Text | Tokens] = [Tokens(tokens=list(row)) for row in rows]
        self.executor.post(self.intake.embedding_job(Embed(request=number, inputs=inputs)))

    def generate(self, number: int, prompt: str, tokens: int) -> None:
        self.wanted += 1
        self.executor.expect(number)
        ask = Generate(stream=number, request=request(prompt, tokens))
        self.executor.post(self.intake.stream(ask, None))

    def run(self) -> None:
        self.executor.run()

    def _hear(self, message: ToDaemon) -> None:
        self.said.append(message)
        self.wanted -= isinstance(message, Embedded | RequestFailed | StreamFailed)
        if isinstance(message, Turn):
            self.wanted -= sum(delta.finish is not None for delta in message.deltas)
        if self.wanted <= 0:
            self.executor.post(Shutdown())

    def vectors(self, number: int) -> Logits:
        (found,) = (it for it in self.said if isinstance(it, Embedded) and it.request == number)
        return np.frombuffer(found.vectors, "<f4").reshape(-1, found.width)

    def failures(self) -> dict[int, str]:
        return {it.request: it.error.code for it in self.said if isinstance(it, RequestFailed)}


def row(number: int, length: int) -> list[int]:
    return [(number + at) % 200 for at in range(length)]


def expected(*rows: Sequence[int]) -> Logits:
    return np.stack([vector_of(one, ORDERS.width) for one in rows])


def test_each_request_gets_its_own_vectors_of_calls_that_all_share() -> None:
    loop = Loop()
    texts = {number: [row(9 * number + at, 3 + at) for at in range(number)] for number in (1, 4, 2)}
    for number, rows in texts.items():
        loop.embed(number, *rows)
    loop.run()
    for number, rows in texts.items():
        np.testing.assert_array_equal(loop.vectors(number), expected(*rows))
    assert [len(call) for call in loop.runtime.embeds] == [7]
    stats = loop.executor.stats()
    told = stats.embed_calls, stats.embedded_inputs, stats.embedded_tokens, stats.embeds_waiting
    assert told == (1, 7, sum(len(it) for rows in texts.values() for it in rows), 0)


def test_no_call_holds_more_tokens_than_the_runtime_takes() -> None:
    loop = Loop()
    rows = [row(at, 1 + 13 * at % 64) for at in range(40)]
    loop.embed(1, *rows[:25])
    loop.embed(2, *rows[25:])
    loop.run()
    np.testing.assert_array_equal(loop.vectors(1), expected(*rows[:25]))
    np.testing.assert_array_equal(loop.vectors(2), expected(*rows[25:]))
    assert max(sum(map(len, call)) for call in loop.runtime.embeds) <= 64


def test_a_short_request_does_not_wait_for_a_long_ones_end() -> None:
    loop = Loop()
    loop.embed(1, *(row(at, 20) for at in range(50)))
    loop.embed(2, row(99, 20))
    loop.run()
    order = [it.request for it in loop.said if isinstance(it, Embedded)]
    assert order == [2, 1]
    assert row(99, 20) in loop.runtime.embeds[0]


class Logged(FakeRuntime):
    """Notes what was called, in order; a token that it embeds takes a millisecond of `clock`."""

    clock: Clock

    def __init__(self, orders: Orders, sequences: int) -> None:
        super().__init__(orders, sequences)
        self.calls: list[str] = []

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self.calls.append("step")
        return super().step(feeds, tick)

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        self.calls.append("embed")
        self.clock.pass_(1e-3 * sum(map(len, tokens)))
        return super().embed(tokens, tick)


def test_streams_and_embeddings_take_turns_and_a_call_beside_streams_is_short() -> None:
    loop = Loop(Orders(context=128, step_tokens=128), Policy(turn_target_ms=10), made=Logged)
    assert isinstance(loop.runtime, Logged)
    with held() as loop.runtime.clock:
        loop.generate(1, "p", 60)
        loop.embed(2, *(row(at, 8) for at in range(64)))
        loop.run()
    calls = loop.runtime.calls
    steps = [at for at, call in enumerate(calls) if call == "step"]
    assert len(steps) == 60
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 2
    first, *later = [sum(map(len, call)) for call in loop.runtime.embeds]
    assert first == 128
    assert len(later) == 12
    assert max(later) <= 32


def test_what_was_cancelled_is_not_embedded_and_costs_nobody_else() -> None:
    class Stage(FakeRuntime):
        def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
            loop.executor.post(Cancel(stream=1))
            return super().embed(tokens, tick)

    loop = Loop(made=Stage)
    loop.embed(1, *(row(at, 20) for at in range(50)), answered=False)
    loop.embed(2, *(row(at, 20) for at in range(9)))
    loop.run()
    np.testing.assert_array_equal(loop.vectors(2), expected(*(row(at, 20) for at in range(9))))
    assert len(loop.runtime.embeds) <= 6
    assert loop.failures() == {}


def test_a_call_that_nobody_waits_for_is_abandoned_within_it() -> None:
    class Stage(FakeRuntime):
        def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
            if len(tokens) == 1:
                return super().embed(tokens, tick)
            loop.executor.post(Cancel(stream=1))
            loop.embed(2, row(7, 3))
            tick()
            raise AssertionError("the call went on")

    loop = Loop(made=Stage)
    loop.embed(1, row(1, 2), row(2, 2), answered=False)
    loop.run()
    np.testing.assert_array_equal(loop.vectors(2), expected(row(7, 3)))
    assert loop.failures() == {}


def test_a_request_cancelled_before_its_intake_is_dropped() -> None:
    loop = Loop()
    loop.executor.post(Cancel(stream=1))
    loop.embed(1, row(1, 2), answered=False)
    loop.embed(2, row(2, 2))
    loop.run()
    assert [it.request for it in loop.said if isinstance(it, Embedded)] == [2]
    loop.executor.embeddings.expect(1)


def test_a_failed_call_is_tried_again_for_each_request_alone() -> None:
    class Allergic(FakeRuntime):
        def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
            if any(66 in one for one in tokens):
                raise Fault("66")
            return super().embed(tokens, tick)

    loop = Loop(made=Allergic)
    loop.embed(1, row(1, 3))
    loop.embed(2, [66], row(2, 3))
    loop.embed(3, row(3, 3))
    loop.run()
    np.testing.assert_array_equal(loop.vectors(1), expected(row(1, 3)))
    np.testing.assert_array_equal(loop.vectors(3), expected(row(3, 3)))
    assert loop.failures() == {2: "fault"}


WRONG: dict[str, tuple[Callable[[Logits], Any], str]] = {
    "no array": (lambda found: found.tolist(), "fault"),
    "doubles": (lambda found: found.astype(np.float64), "fault"),
    "a vector too few": (lambda found: found[:-1], "fault"),
    "another width": (lambda found: found[:, :-1], "fault"),
    "no numbers": (lambda found: found * np.float32(np.nan), "not_finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_breaks_the_contract_is_a_fault(kind: str) -> None:
    class Wrong(FakeRuntime):
        def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
            found: Logits = break_(super().embed(tokens, tick))
            return found

    break_, code = WRONG[kind]

    loop = Loop(made=Wrong)
    loop.embed(1, row(1, 3), row(2, 3))
    loop.run()
    assert loop.failures() == {1: code}


def test_an_exception_of_no_tree_is_a_fault_and_a_fatal_one_ends_the_loop() -> None:
    loop = Loop()
    loop.runtime.fail_next = [ZeroDivisionError("odd")]
    loop.embed(1, row(1, 3))
    loop.run()
    assert loop.failures() == {1: "fault"}
    loop = Loop()
    loop.runtime.fail_next = [Fatal("lost")]
    loop.embed(1, row(1, 3))
    with pytest.raises(Fatal):
        loop.run()


class Narrow(FakeRuntime):
    """Has room for one row at a time, and for none while sequences hold anything."""

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        if len(tokens) > 1 or self.memory().sequences:
            raise Capacity("no room")
        return super().embed(tokens, tick)


def test_what_finds_no_room_takes_the_caches_and_waits_for_streams() -> None:
    loop = Loop(Orders(context=256), made=Narrow)
    loop.generate(1, "x" * 80, 5)
    loop.embed(2, row(1, 3), row(2, 3), row(3, 3))
    loop.run()
    assert loop.vectors(2).shape == (3, 8)
    assert [len(call) for call in loop.runtime.embeds] == [1, 1, 1]
    assert loop.executor.stats().stored == 0


def test_what_never_finds_room_is_told() -> None:
    class Full(FakeRuntime):
        def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
            raise Capacity("no room ever")

    loop = Loop(made=Full)
    loop.embed(1, row(1, 3), row(2, 3))
    loop.run()
    assert loop.failures() == {1: "capacity"}


def test_so_many_wait_and_no_more_and_a_number_once() -> None:
    embeddings = Loop(policy=Policy(max_waiting=0)).executor.embeddings
    embeddings.expect(1)
    with pytest.raises(BadFrame):
        embeddings.expect(1)
    embeddings.expect(2)
    with pytest.raises(Overloaded, match="2 embedding requests run or wait"):
        embeddings.expect(3)


def test_more_than_memory_should_hold_is_refused_while_others_wait() -> None:
    loop = Loop()
    loop.embed(1, row(1, 3))
    huge = array("i", [1]) * (65 << 20)
    loop.wanted += 1
    loop.executor.embeddings.expect(2)
    loop.executor.post(EmbedJob(2, [huge], 8))
    loop.run()
    assert loop.failures() == {2: "overloaded"}


def test_the_end_of_the_loop_is_told_to_those_that_wait() -> None:
    loop = Loop()
    loop.executor.post(Shutdown())
    loop.embed(1, row(1, 3))
    loop.run()
    assert loop.failures() == {1: "cancelled"}


def test_a_model_without_text_needs_no_lanes() -> None:
    loop = Loop(Orders(generates=False, context=64))
    loop.embed(1, row(1, 3))
    loop.run()
    np.testing.assert_array_equal(loop.vectors(1), expected(row(1, 3)))
    assert loop.runtime.closed


# Before the loop.

EMBEDDING = Embedding(width=8, tokens=16, batch_tokens=64)


def intake(embedding: Embedding | None = EMBEDDING, *, generates: bool = True) -> Intake:
    tokenizer = ByteTokenizer()
    codec = ChatCodec(tokenizer, None)
    return Intake(tokenizer, codec, 64, VOCABULARY, generates, embedding)


def job(*inputs: Text | Tokens, dimensions: int | None = None) -> EmbedJob:
    return intake().embedding_job(Embed(request=1, inputs=list(inputs), dimensions=dimensions))


def test_texts_are_opened_as_the_model_wants_and_ids_are_taken_as_they_are() -> None:
    found = job(Text(text="hé <eos>"), Tokens(tokens=[5, 6]), dimensions=8)
    assert [list(one) for one in found.rows] == [[BOS, *"hé <eos>".encode()], [5, 6]]


REFUSED: list[tuple[type[Exception], str, str, list[Text | Tokens]]] = [
    (ContextLengthExceeded, "input", "input holds 17 tokens, the model embeds at most 16",
     [Tokens(tokens=[1] * 17)]),
    (ContextLengthExceeded, "input.1", "input.1 holds 21 tokens",
     [Text(text="fine"), Text(text="x" * 20), Text(text="fine")]),
    (ContextLengthExceeded, "input.1", "input.1 holds at least 167 tokens",
     [Text(text="fine"), Text(text="x" * 1000)]),
    (InvalidField, "input.0", "input.0 holds no token", [Tokens(tokens=[]), Text(text="fine")]),
    (InvalidField, "input.1", "token 259 is none", [Text(text="fine"), Tokens(tokens=[259])]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "param", "says", "inputs"), REFUSED)
def test_an_input_that_does_not_do_is_refused_by_its_place(
    kind: type[Exception], param: str, says: str, inputs: list[Text | Tokens]
) -> None:
    with pytest.raises(kind, match=says) as caught:
        job(*inputs)
    assert getattr(caught.value, "param", None) == param


def test_other_dimensions_than_the_models_are_refused() -> None:
    with pytest.raises(InvalidField, match="dimensions is 4, this model's vectors have 8"):
        job(Text(text="a"), dimensions=4)


def test_more_vectors_than_an_answer_holds_are_refused() -> None:
    wide = intake(Embedding(width=1 << 20, tokens=16, batch_tokens=16))
    with pytest.raises(InvalidField, match="at most 8 vectors of 1048576"):
        wide.embedding_job(Embed(request=1, inputs=[Text(text="a")] * 9))


def test_a_model_is_asked_only_for_what_it_gives() -> None:
    with pytest.raises(EmbeddingsUnsupported):
        intake(None).embedding_job(Embed(request=1, inputs=[Text(text="a")]))
    with pytest.raises(GenerationUnsupported):
        intake(generates=False).stream(Generate(stream=1, request=request("a")), None)

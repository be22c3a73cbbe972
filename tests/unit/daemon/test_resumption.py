"""Who is sent to a worker, when, and who is to blame; over a list in place of a worker."""

from __future__ import annotations

import itertools

import pytest

from superfluid.supervisor.resume import FAULT, SUSPECT, Resumption
from superfluid.supervisor.streams import LiveStream
from superfluid_compat.errors import BadFrame, FrameTooLarge
from superfluid_workerd.link.frames import (
    Cancel,
    Delta,
    Generate,
    GenerationRequest,
    Logprob,
    Prompted,
    Replay,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
    ToWorker,
)


class Bench:
    """A resumption and what it sent."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.resumption = Resumption(self.sent.append, itertools.count(1))

    def stream(self, name: str) -> LiveStream:
        stream = LiveStream(GenerationRequest(prompt=Text(text=name)), self.resumption.remove)
        self.resumption.add(stream)
        return stream

    def begun(self, stream: LiveStream, cached: int | None = 0) -> None:
        self.resumption.prompted(Prompted(stream=stream.number, tokens=[1, 2], cached=cached))

    def gain(self, stream: LiveStream, token: int, *, last: bool = False) -> None:
        delta = Delta(
            stream=stream.number, tokens=[token], text="x", finish="stop" if last else None
        )
        self.resumption.gained(delta)

    def started(self) -> list[int]:
        """Numbers of the streams sent since the last look."""
        found = [message.stream for message in self.sent if isinstance(message, Generate)]
        self.sent.clear()
        return found


async def test_a_stream_is_continued_where_it_stands() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    stream = bench.stream("a")
    bench.begun(stream)
    bench.gain(stream, 7)
    bench.gain(stream, 8)
    assert bench.resumption.died() is None
    old = stream.number
    bench.sent.clear()
    bench.resumption.serving(100)
    (message,) = bench.sent
    assert isinstance(message, Generate)
    assert message.replay == Replay(prompt=[1, 2], committed=[7, 8], sent={"text": 2})
    assert message.request.prompt == Tokens(tokens=[])
    assert message.stream != old
    bench.resumption.gained(Delta(stream=old, tokens=[9], text="late"))
    assert stream.committed == [7, 8]


async def test_streams_wait_for_a_worker_and_go_in_the_order_they_came() -> None:
    bench = Bench()
    first, second = bench.stream("a"), bench.stream("b")
    assert bench.sent == []
    bench.resumption.serving(100)
    assert bench.started() == [first.number, second.number]
    bench.resumption.died()
    third = bench.stream("c")
    bench.resumption.serving(100)
    assert bench.started() == [first.number, second.number, third.number]


async def test_suspects_are_sent_one_at_a_time_and_the_guilty_fails_alone() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    streams = [bench.stream(name) for name in "abc"]
    for _ in range(2):
        for stream in streams:
            bench.begun(stream)
        assert bench.resumption.died() is None
        bench.started()
        bench.resumption.serving(100)
    assert bench.started() == [streams[0].number]
    later = bench.stream("later")
    assert bench.started() == []
    bench.gain(streams[0], 5)
    withdrawn, probed = bench.sent
    assert withdrawn == Cancel(stream=streams[0].number)
    assert isinstance(probed, Generate)
    assert probed.stream == streams[1].number
    assert bench.resumption.died() is streams[1]
    bench.started()
    bench.resumption.serving(100)
    assert bench.started() == [streams[2].number]
    bench.gain(streams[2], 5)
    assert bench.started() == [streams[0].number, later.number]
    assert len(bench.resumption) == 3


async def test_a_death_counts_only_against_what_was_begun_and_gained_nothing() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    gaining, waiting, stuck = (bench.stream(name) for name in "abc")
    for token in range(2):
        bench.begun(gaining)
        bench.begun(waiting, cached=None)
        bench.begun(stuck)
        bench.gain(gaining, token)
        assert bench.resumption.died() is None
        bench.started()
        bench.resumption.serving(100)
    assert [gaining.blame, waiting.blame, stuck.blame] == [0, 0, SUSPECT]
    assert bench.started() == [stuck.number]


async def test_a_death_counts_for_nothing_where_a_prompt_got_further_than_ever() -> None:
    bench = Bench()
    stream = bench.stream("long")
    found = []
    for reached in (100, 300, 300, 200, 301):
        bench.resumption.serving(1000)
        bench.resumption.prompted(Prompted(stream=stream.number, tokens=[1] * 400, cached=0))
        bench.resumption.prefilled(stream.number, 50)
        bench.resumption.prefilled(stream.number, reached)
        bench.resumption.died()
        found.append(stream.blame)
    assert found == [0, 0, FAULT, SUSPECT, SUSPECT]
    bench.resumption.prefilled(stream.number, 400)  # of a worker that is gone


async def test_no_stream_is_further_than_its_last_token() -> None:
    bench = Bench()
    stream = bench.stream("a")
    bench.resumption.serving(100)
    bench.begun(stream)
    bench.gain(stream, 7)
    bench.resumption.prefilled(stream.number, 2)
    for tokens in (3, -1):
        with pytest.raises(BadFrame, match=f"{tokens} tokens of 3"):
            bench.resumption.prefilled(stream.number, tokens)


async def test_a_probe_that_ends_or_is_left_lets_the_others_go() -> None:
    for how in ("ends", "is left", "is refused"):
        bench = Bench()
        bench.resumption.serving(100)
        stream = bench.stream("a")
        for _ in range(2):
            bench.begun(stream)
            bench.resumption.died()
            bench.resumption.serving(100)
        other = bench.stream("b")
        bench.sent.clear()
        if how == "ends":
            bench.gain(stream, 5, last=True)
        elif how == "is left":
            stream.abandon()
        else:
            assert bench.resumption.failed(stream.number) is stream
        assert bench.started() == [other.number]
        assert bench.resumption.died() is None


async def test_a_stream_that_fits_no_frame_fails_and_the_rest_go_on() -> None:
    sent: list[ToWorker] = []

    def send(message: ToWorker) -> None:
        if isinstance(message, Generate) and message.request.prompt == Text(text="large"):
            raise FrameTooLarge("too large")
        sent.append(message)

    resumption = Resumption(send, itertools.count(1))
    streams = [
        LiveStream(GenerationRequest(prompt=Text(text=text)), resumption.remove)
        for text in ("a", "large", "b")
    ]
    for stream in streams:
        resumption.add(stream)
    resumption.serving(100)
    assert [type(message) for message in sent] == [Generate, Generate]
    assert isinstance(streams[1].accepted.exception(), FrameTooLarge)
    assert len(resumption) == 2


async def test_who_is_killed_from_outside_is_not_blamed_before_long() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    slow, other = bench.stream("slow"), bench.stream("other")
    for _ in range(15):
        bench.begun(slow)
        bench.begun(other)
        assert bench.resumption.died(outside=True) is None
        bench.started()
        bench.resumption.serving(100)
        assert bench.started() == [slow.number, other.number]
    bench.gain(slow, 1)
    bench.begun(other)
    bench.resumption.died(outside=True)
    bench.started()
    bench.resumption.serving(100)
    assert bench.started() == [other.number]
    assert slow.blame == 0


async def test_a_prompt_under_which_every_worker_is_killed_fails_alone_in_the_end() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    killer, other = bench.stream("killer"), bench.stream("other")
    kills, guilty = 0, None
    while guilty is None and kills < 100:
        kills += 1
        if killer.number in bench.started():
            bench.begun(killer)
        guilty = bench.resumption.died(outside=True)
        bench.resumption.serving(100)
    assert guilty is killer
    assert kills == 32
    assert bench.started() == [other.number]


async def test_a_suspect_under_which_the_worker_fails_is_guilty_at_once() -> None:
    bench = Bench()
    bench.resumption.serving(100)
    killer = bench.stream("killer")
    for _ in range(2):
        bench.begun(killer)
        bench.resumption.died()
        bench.resumption.serving(100)
    assert bench.resumption.died(outside=True) is None
    bench.resumption.serving(100)
    assert bench.resumption.died() is killer


_LOGPROB = Logprob(token=1, text=b"x", logprob=-1.0)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Delta(stream=1, tokens=[1] * 6), "6 tokens to a stream of at most 5"),
        (Delta(stream=1, tokens=[1], text="x" * 2049), "2049 characters of text for 1 tokens"),
        (Delta(stream=1, text="x" * 1025), "1025 characters of text for 0 tokens"),
        (Delta(stream=1, tokens=[1], finish="stop", stopped_by="b"), "no stop string"),
        (Delta(stream=1, logprobs=[TokenLogprob(chosen=_LOGPROB)]), "for 0 tokens"),
        (
            Delta(
                stream=1, tokens=[1], logprobs=[TokenLogprob(chosen=_LOGPROB, top=[_LOGPROB] * 3)]
            ),
            "3 alternatives, 2 were",
        ),
    ],
)
async def test_more_than_was_asked_for_is_a_breach(delta: Delta, words: str) -> None:
    bench = Bench()
    request = GenerationRequest(
        prompt=Text(text="a"), max_tokens=5, stop=("a",), sampling=Sampling(logprobs=2)
    )
    stream = LiveStream(request, bench.resumption.remove)
    bench.resumption.add(stream)
    bench.resumption.serving(100)
    bench.begun(stream)
    with pytest.raises(BadFrame, match=words):
        bench.resumption.gained(delta)


async def test_deltas_without_tokens_are_bounded_and_so_is_the_context() -> None:
    bench = Bench()
    stream = bench.stream("a")
    bench.resumption.serving(8)
    bench.begun(stream)
    for _ in range(16):
        bench.resumption.gained(Delta(stream=1, channel="reasoning"))
    with pytest.raises(BadFrame, match="deltas that no token accounts for"):
        bench.resumption.gained(Delta(stream=1, channel="reasoning"))
    with pytest.raises(BadFrame, match="7 tokens to a stream of at most 6"):
        bench.resumption.gained(Delta(stream=1, tokens=[1] * 7))


@pytest.mark.parametrize(
    ("tokens", "cached", "words"),
    [([1] * 9, 0, "9 tokens, the context has 8"), ([1, 2], 3, "3 cached"), ([3], 0, "another")],
)
async def test_a_prompt_that_cannot_be_is_a_breach(
    tokens: list[int], cached: int, words: str
) -> None:
    bench = Bench()
    stream = bench.stream("a")
    bench.resumption.serving(8)
    bench.begun(stream)
    with pytest.raises(BadFrame, match=words):
        bench.resumption.prompted(Prompted(stream=stream.number, tokens=tokens, cached=cached))

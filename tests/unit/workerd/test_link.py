"""The link's framing and messages, against any cutting and any bytes."""

from __future__ import annotations

import itertools
import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_compat.errors import (
    BY_CODE,
    BadFrame,
    FrameTooLarge,
    LinkClosed,
    LinkError,
    MalformedRequest,
    SuperfluidError,
)
from superfluid_workerd.link import frames, framing
from superfluid_workerd.link.answers import Facts, Refusal
from superfluid_workerd.link.refusals import error_of, refusal

TO_WORKER = get_args(frames.ToWorker)
TO_DAEMON = get_args(frames.ToDaemon)

texts = st.text(st.characters(codec="utf-8"), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
small = st.integers(-(2**63), 2**64 - 1)


def fitting(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a type, by its annotations."""
    info: Any = msgspec.inspect.type_info(kind)
    return st.builds(kind, **{field.name: by_info(field.type) for field in info.fields})


def by_info(info: Any) -> st.SearchStrategy[Any]:
    known: dict[type, Any] = {
        msgspec.inspect.StrType: lambda: texts,
        msgspec.inspect.IntType: lambda: small,
        msgspec.inspect.FloatType: lambda: st.floats(allow_nan=False),
        msgspec.inspect.BytesType: lambda: st.binary(max_size=5),
        msgspec.inspect.BoolType: st.booleans,
        msgspec.inspect.NoneType: st.none,
        msgspec.inspect.AnyType: lambda: json_values,
        msgspec.inspect.LiteralType: lambda: st.sampled_from(info.values),
        msgspec.inspect.StructType: lambda: fitting(info.cls),
        msgspec.inspect.UnionType: lambda: st.one_of(*map(by_info, info.types)),
        msgspec.inspect.ListType: lambda: st.lists(by_info(info.item_type), max_size=3),
        msgspec.inspect.VarTupleType: lambda: st.lists(by_info(info.item_type), max_size=3).map(
            tuple
        ),
        msgspec.inspect.DictType: lambda: st.dictionaries(
            by_info(info.key_type), by_info(info.value_type), max_size=2
        ),
    }
    made: st.SearchStrategy[Any] = known[type(info)]()
    return made


to_worker = st.one_of(*map(fitting, TO_WORKER))
to_daemon = st.one_of(*map(fitting, TO_DAEMON))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(st.lists(to_worker, max_size=3), st.lists(st.integers(0, 5000), max_size=6))
def test_messages_to_the_worker_arrive_however_they_are_cut(
    messages: list[frames.ToWorker], places: list[int]
) -> None:
    reader = framing.to_worker()
    data = b"".join(map(framing.encode, messages))
    assert [one for part in cut(data, places) for one in reader.feed(part)] == messages
    reader.close()


@given(st.lists(to_daemon, max_size=3), st.lists(st.integers(0, 5000), max_size=6))
def test_messages_to_the_daemon_arrive_however_they_are_cut(
    messages: list[frames.ToDaemon], places: list[int]
) -> None:
    reader = framing.to_daemon()
    data = b"".join(map(framing.encode, messages))
    assert [one for part in cut(data, places) for one in reader.feed(part)] == messages
    reader.close()


@given(to_daemon, st.integers(1, 10_000))
def test_a_cut_short_frame_is_a_closed_link(message: frames.ToDaemon, left_out: int) -> None:
    data = framing.encode(message)
    part = data[: -(left_out % len(data)) or -1]
    reader = framing.to_daemon()
    assert list(reader.feed(part)) == []
    if part:
        with pytest.raises(LinkClosed, match=str(len(part))):
            reader.close()


@given(st.binary(max_size=200))
def test_garbage_is_a_message_or_a_link_error(data: bytes) -> None:
    for reader in (framing.to_worker(), framing.to_daemon()):
        for stream in (data, framed(data)):
            try:
                list(reader.feed(stream))
                reader.close()
            except LinkError:
                break


@given(to_daemon, st.integers(4, 10_000), st.integers(0, 255))
def test_a_damaged_byte_is_a_message_or_a_link_error(
    message: frames.ToDaemon, place: int, value: int
) -> None:
    data = bytearray(framing.encode(message))
    data[4 + place % (len(data) - 4)] = value
    try:
        list(framing.to_daemon().feed(bytes(data)))
    except LinkError:
        return


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode({"type": "Reboot"}),
        msgspec.msgpack.encode({"type": "Pong", "number": 1}),
        msgspec.msgpack.encode({"number": 1}),
        msgspec.msgpack.encode({"type": "Ping"}),
        msgspec.msgpack.encode({"type": "Ping", "number": "1"}),
        msgspec.msgpack.encode({"type": "Ping", "number": 1}) + b"\0",
        b"\x82\xa4type\xaaDetokenize\xa6tokens\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa4\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Load\xa7options\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_an_unknown_or_misshapen_frame_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame, match=f"a frame of {len(body)} bytes"):
        list(framing.to_worker().feed(framed(body)))


def test_a_frame_over_the_cap_is_refused_by_its_head_alone() -> None:
    with pytest.raises(FrameTooLarge, match=str(framing.CAP + 1)):
        list(framing.to_worker().feed(struct.pack(">I", framing.CAP + 1)))
    assert list(framing.to_worker().feed(struct.pack(">I", framing.CAP))) == []
    huge = frames.Detokenized(request=1, text="x" * framing.CAP)
    with pytest.raises(FrameTooLarge):
        framing.encode(huge)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["\ud800", 10**40, nested(100_000)])
def test_what_no_frame_can_hold_is_the_clients_fault(value: object) -> None:
    chat = frames.Messages(messages=[{"role": "user", "content": value}])
    with pytest.raises(MalformedRequest):
        framing.encode(frames.Tokenize(request=1, prompt=chat))


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE.keys())
def test_an_error_crosses_the_link_as_itself(kind: type[SuperfluidError]) -> None:
    error = kind("found this, wanted that", fix="do it", param="top_p", dossier="d-1")
    frame = frames.StreamFailed(stream=1, error=refusal(error))
    (received,) = framing.to_daemon().feed(framing.encode(frame))
    assert isinstance(received, frames.StreamFailed)
    back = error_of(received.error)
    assert type(back) is kind
    assert (back.message, back.fix, back.param, back.dossier) == (
        error.message,
        error.fix,
        error.param,
        error.dossier,
    )
    assert back.line() == error.line()


def test_an_error_of_an_unknown_code_is_the_root() -> None:
    back = error_of(Refusal(code="from_the_future", message="m"))
    assert type(back) is SuperfluidError
    assert back.message == "m"


def test_every_message_has_a_tag_of_its_own_in_its_direction() -> None:
    for kinds in (TO_WORKER, TO_DAEMON):
        tags = [kind.__struct_config__.tag for kind in kinds]
        assert len(set(tags)) == len(tags)


def test_a_default_is_not_sent_and_comes_back() -> None:
    facts = Facts(format="gguf", architecture="llama")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=Facts) == facts
    assert len(framing.encode(frames.Ping(number=1))) < 24

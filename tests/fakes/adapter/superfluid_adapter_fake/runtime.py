"""A runtime whose sequence state is a hash chain of the tokens fed and whose logits are its hash.

Logits that fit belong to exactly these tokens in this order, so that any state that leaks from one
sequence into another is a plain mismatch.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from superfluid_adapter_fake.orders import Moment, Orders
from superfluid_adapter_fake.tokenizer import EOS, VOCABULARY
from superfluid_compat.errors import (
    Capacity,
    Fatal,
    Fault,
    OutOfBoundary,
    UnknownSequence,
    Unsupported,
)
from superfluid_workerd.adapter import (
    Embedding,
    Feed,
    MemoryUse,
    Runtime,
    RuntimeDescription,
    SequenceId,
    Tick,
)

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

_ROOT: Final = hashlib.blake2b(b"root", digest_size=16).digest()
STATE_BYTES: Final = 16
"""What a token of a sequence takes."""
_PRINTABLE: Final = np.zeros(VOCABULARY, np.float32)
_PRINTABLE[:] = -20.0
_PRINTABLE[32:127] = 0.0


def root() -> bytes:
    """The state of an empty sequence."""
    return _ROOT


def extend(state: bytes, token: int) -> bytes:
    """The state after one more token."""
    return hashlib.blake2b(state + token.to_bytes(4, "big"), digest_size=16).digest()


def logits_of(state: bytes, length: int, orders: Orders) -> Logits:
    """The row after `length` tokens that led to `state`: float32 of shape (vocabulary,)."""
    raw = np.frombuffer(hashlib.shake_128(state).digest(2 * VOCABULARY), np.uint16)
    row: Logits = raw.astype(np.float32) / np.float32(8192.0) + _PRINTABLE
    if orders.script:
        script = orders.script.encode()
        row[script[length % len(script)]] += np.float32(40.0)
    if orders.eos is not None and length >= orders.eos:
        row[EOS] += np.float32(100.0)
    return row


def vector_of(tokens: Sequence[int], width: int) -> Logits:
    """The embedding of `tokens`: float32 of shape (width,), of length 1."""
    state = _ROOT
    for token in tokens:
        state = extend(state, token)
    raw = np.frombuffer(hashlib.shake_128(state).digest(2 * width), np.uint16)
    vector = raw.astype(np.float64) - 32768.5
    unit: Logits = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


class _Payload(msgspec.Struct, frozen=True, kw_only=True):
    context: int
    states: tuple[bytes, ...]


class FakeRuntime(Runtime):
    """Sequences by id, each the list of its states, one for every length.

    `fail_next` makes the next steps raise these errors, one each, after the states have grown:
    the worst that the contract allows. `steps` records the feeds of each step that succeeded,
    `embeds` the rows of each call that embedded.
    """

    def __init__(self, orders: Orders, sequences: int) -> None:
        self._orders = orders
        self._sequences: dict[SequenceId, list[bytes]] = {}
        self._limit = sequences + orders.spare
        self._next = 0
        self._fed = 0
        self._made: list[list[int]] = [[] for _ in range(orders.load_objects)]
        self._acts = sorted(orders.moments, key=lambda moment: moment.tokens)
        self.fail_next: list[Exception] = []
        self.steps: list[list[Feed]] = []
        self.embeds: list[list[list[int]]] = []
        self.closed = False

    def describe(self) -> RuntimeDescription:
        embedding = Embedding(
            width=self._orders.width,
            tokens=self._orders.context,
            batch_tokens=max(self._orders.context, self._orders.step_tokens),
            pooling="last",
        )
        return RuntimeDescription(
            context=self._orders.context,
            sequences=self._limit,
            vocabulary=VOCABULARY,
            step_tokens=self._orders.step_tokens,
            truncate=self._orders.truncate,
            copy=self._orders.copy,
            export=self._orders.export,
            row_invariant=True,
            tokens=self._orders.tokens if self._orders.tells else 0,
            swap_bytes=self._orders.swap,
            retry=self._orders.retry,
            generates=self._orders.generates,
            embedding=embedding if self._orders.width else None,
        )

    @property
    def count(self) -> int:
        """Sequences that exist."""
        return len(self._sequences)

    def seq_create(self) -> SequenceId:
        self._require_text()
        return self._add([_ROOT])

    def _require_text(self) -> None:
        if not self._orders.generates:
            raise Unsupported("this model gives embeddings and no text")

    def _add(self, states: list[bytes]) -> SequenceId:
        if len(self._sequences) >= self._limit:
            raise Capacity(f"{self._limit} sequences exist, no more fit")
        self._room(len(states) - 1)
        self._next += 1
        self._sequences[self._next] = states
        return self._next

    def _room(self, more: int) -> None:
        held = sum(len(states) - 1 for states in self._sequences.values())
        if 0 < self._orders.tokens < held + more:
            raise Capacity(f"{held} tokens are held and {more} more were wanted")

    def _states(self, sequence: SequenceId) -> list[bytes]:
        self._require_text()
        if sequence not in self._sequences:
            raise UnknownSequence(f"no sequence {sequence}")
        return self._sequences[sequence]

    def seq_free(self, sequence: SequenceId) -> None:
        self._states(sequence)
        del self._sequences[sequence]

    def seq_length(self, sequence: SequenceId) -> int:
        return len(self._states(sequence)) - 1

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        states = self._states(sequence)
        if not 0 <= length < len(states):
            raise OutOfBoundary(f"length {length}, the sequence holds {len(states) - 1}")
        if self._orders.truncate == "zero" and 0 < length < len(states) - 1:
            raise Unsupported("this model truncates to 0 only")
        del states[length + 1 :]

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        states = self._states(sequence)
        if not self._orders.copy:
            raise Unsupported("this model does not copy")
        if not 0 <= length < len(states):
            raise OutOfBoundary(f"length {length}, the sequence holds {len(states) - 1}")
        if self._orders.truncate == "zero" and 0 < length < len(states) - 1:
            raise Unsupported("this model copies whole sequences only")
        return self._add(states[: length + 1])

    def seq_export(self, sequence: SequenceId) -> bytes:
        states = self._states(sequence)
        if not self._orders.export:
            raise Unsupported("this model does not export")
        body = msgspec.msgpack.encode(_Payload(context=self._orders.context, states=tuple(states)))
        return hashlib.blake2b(body, digest_size=16).digest() + body

    def seq_import(self, payload: bytes) -> SequenceId:
        if not self._orders.export:
            raise Unsupported("this model does not import")
        digest, body = payload[:16], payload[16:]
        if hashlib.blake2b(body, digest_size=16).digest() != digest:
            raise Unsupported("the payload is damaged")
        held = msgspec.msgpack.decode(body, type=_Payload)
        if held.context != self._orders.context:
            raise Unsupported("the payload is of another setting")
        return self._add(list(held.states))

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        for feed in feeds:
            self._check(feed)
        if sum(len(feed.tokens) for feed in feeds) > self._orders.step_tokens:
            raise OutOfBoundary(f"more than {self._orders.step_tokens} tokens in one step")
        self._room(sum(len(feed.tokens) for feed in feeds))
        self._wait(tick)
        self._swallow([feed.tokens for feed in feeds])
        rows = [self._extend(feed, tick) for feed in feeds]
        if self.fail_next:
            raise self.fail_next.pop(0)
        self.steps.append(list(feeds))
        return rows

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        if not self._orders.width:
            raise Unsupported("this model gives no embeddings")
        for row in tokens:
            if not 0 < len(row) <= self._orders.context:
                raise OutOfBoundary(f"{len(row)} tokens, wanted 1 to {self._orders.context}")
            if not all(0 <= token < VOCABULARY for token in row):
                raise OutOfBoundary("a row needs tokens of the vocabulary")
        self._wait(tick)
        self._swallow(tokens)
        for _ in range(sum(map(len, tokens))):
            self._fed += 1
            self._act()
        if self.fail_next:
            raise self.fail_next.pop(0)
        self.embeds.append([list(row) for row in tokens])
        return np.stack([vector_of(row, self._orders.width) for row in tokens])

    def _swallow(self, rows: Sequence[Sequence[int]]) -> None:
        fed = set(itertools.chain.from_iterable(rows))
        if not fed.isdisjoint(self._orders.poison.encode()):
            _perform(Moment(act="signal", signal="SIGSEGV"))
        if not fed.isdisjoint(self._orders.greed.encode()):
            _perform(Moment(act="hoard"))

    def _check(self, feed: Feed) -> None:
        length = self.seq_length(feed.sequence)
        if not feed.tokens or not all(0 <= token < VOCABULARY for token in feed.tokens):
            raise OutOfBoundary("a feed needs tokens of the vocabulary")
        if feed.start != length:
            raise OutOfBoundary(f"start {feed.start}, the sequence holds {length}")
        if length + len(feed.tokens) > self._orders.context:
            raise OutOfBoundary(
                f"{length + len(feed.tokens)} tokens, the context is {self._orders.context}"
            )

    def _wait(self, tick: Tick) -> None:
        if self._orders.step_s:
            time.sleep(self._orders.step_s)
        tick()
        while self._orders.gate and not Path(self._orders.gate).exists():
            time.sleep(0.002)
            tick()

    def _extend(self, feed: Feed, tick: Tick) -> Logits | None:
        states = self._states(feed.sequence)
        rows = []
        for token in feed.tokens:
            states.append(extend(states[-1], token))
            self._fed += 1
            self._act()
            if feed.logits == "all":
                rows.append(logits_of(states[-1], len(states) - 1, self._orders))
        tick()
        if feed.logits == "last":
            rows.append(logits_of(states[-1], len(states) - 1, self._orders))
        return np.stack(rows) if rows else None

    def _act(self) -> None:
        while self._acts and self._acts[0].tokens <= self._fed:
            moment = self._acts.pop(0)
            if moment.due():
                _perform(moment)

    def memory(self) -> MemoryUse:
        states = sum(len(states) - 1 for states in self._sequences.values())
        return MemoryUse(weights=VOCABULARY, sequences=states * STATE_BYTES)

    def close(self) -> None:
        self._sequences.clear()
        self.closed = True


def _perform(moment: Moment) -> None:
    print(f"fake: {moment.act} at {moment.tokens} tokens", file=sys.stderr, flush=True)
    match moment.act:
        case "signal":
            os.kill(os.getpid(), signal.Signals[moment.signal])
            time.sleep(3600)
        case "exit":
            os._exit(moment.exit)
        case "hang":
            time.sleep(3600)
        case "fault":
            raise Fault("the fake was told to fail this step")
        case "fatal":
            raise Fatal("the fake was told to lose its state")
        case "raise":
            raise ZeroDivisionError("an exception of no tree")
        case "garbage":
            os.write(_link(), (1 << 31).to_bytes(4, "big") + os.urandom(64))
        case "escape":
            from superfluid_adapter_fake.hostile import attempt

            attempt(moment.targets)
        case "hoard":
            hoard = []
            while True:
                hoard.append(b"\1" * (1 << 24))
        case "count":
            print(f"{len(gc.get_objects())} objects to look at", file=sys.stderr, flush=True)
        case "half-frame":
            os.write(_link(), (100).to_bytes(4, "big") + b"half")
            os._exit(1)


def _link() -> int:
    """The only socket that a worker holds."""
    for descriptor in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return descriptor
        except OSError:
            continue
    raise LookupError("this process holds no socket")

"""One generation inside the worker: its tokens, what was fed of them, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.codec.text import TextStream
from superfluid_workerd.lanes import Lane
from superfluid_workerd.link.frames import Class, Delta, Finish, Logprob, TokenLogprob
from superfluid_workerd.sampling import Drawn, Sampler

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


@dataclass(slots=True, eq=False)
class Stream:
    """`history` is the prompt and every token drawn since; `fed` of it are in the runtime.

    `limit` is the most tokens to draw, `deadline` a monotonic time in seconds. `before` is what a
    replayed stream still owes its client from the tokens it brought.

    For its place in line: when it `arrived`, since when it waits (`queued`) and how long it had
    `waited` before, what it is `due` by that, how often it was `passed` by one that fits, how many
    tokens of room it takes (`reserve`); since when it has its lane (`began`), how often it gave one
    up (`parkings`).
    `cached` of its prompt were there already, `parked` is its state while it is preempted, `chain`
    its history's hashes (see `prefix`), `faults` counts failed steps in a row. It `follows` a
    stream that prefills what both begin with, up to that many tokens.
    """

    number: int
    history: list[int]
    prompt_tokens: int
    limit: int
    stops: frozenset[int]
    sampler: Sampler
    text: TextStream
    tokenizer: Tokenizer
    deadline: float | None = None
    service_class: Class = "agent"
    reserve: int = 0
    arrived: float = 0.0
    queued: float = 0.0
    waited: float = 0.0
    due: float = 0.0
    began: float = 0.0
    parkings: int = 0
    passed: int = 0
    cached: int | None = None
    announced: bool = False
    parked: bytes | None = None
    chain: list[bytes] = field(default_factory=list)
    follows: tuple[Stream, int] | None = None
    faults: int = 0
    order: int = -1
    fed: int = 0
    seated: int = -1
    lane: Lane | None = None
    cancelled: bool = False
    before: str = ""
    finish: Finish | None = None

    @property
    def pending(self) -> int:
        """Tokens known but not yet fed; at least one while the stream runs."""
        return len(self.history) - self.fed

    @property
    def drawn(self) -> int:
        """Tokens of the answer so far."""
        return len(self.history) - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether only the last drawn token is to be fed."""
        return self.pending == 1 and self.drawn > 0

    def over(self, now: float) -> bool:
        """Whether nobody waits for it any more."""
        return self.cancelled or (self.deadline is not None and now >= self.deadline)

    def restore(self, committed: list[int]) -> None:
        """Take over the tokens of an earlier life, up to where they end the stream."""
        for token in committed:
            if self.finish is None:
                self.before += self._take(token)

    def draw(self, row: Logits) -> Delta:
        """Draw one token from `row`, of shape (vocabulary,). Raises `Fault` for an unusable row."""
        drawn = self.sampler.draw(row, self.drawn, self.history)
        text, self.before = self.before + self._take(drawn.token), ""
        return Delta(
            stream=self.number,
            tokens=[drawn.token],
            text=text,
            logprobs=self._logprobs(drawn),
            finish=self.finish,
            stopped_by=self.text.stopped_by,
        )

    def ended(self) -> Delta:
        """What remains to be said of a stream that ended without a turn."""
        return Delta(
            stream=self.number,
            text=self.before if self.finish else "",
            finish=self.finish or "cancelled",
            stopped_by=self.text.stopped_by,
        )

    def _take(self, token: int) -> str:
        self.history.append(token)
        stopped = token in self.stops
        text = "" if stopped else self.text.push(self.tokenizer.piece(token))
        if stopped or self.drawn >= self.limit:
            text += self.text.finish()
        if stopped or self.text.stopped_by is not None:
            self.finish = "stop"
        elif self.drawn >= self.limit:
            self.finish = "length"
        return text

    def _logprobs(self, drawn: Drawn) -> list[TokenLogprob]:
        if drawn.logprob is None:
            return []
        top = [self._logprob(each.token, each.logprob) for each in drawn.top]
        return [TokenLogprob(chosen=self._logprob(drawn.token, drawn.logprob), top=top)]

    def _logprob(self, token: int, logprob: float) -> Logprob:
        text = self.tokenizer.piece(token, special=True)
        return Logprob(token=token, text=text, logprob=logprob)

"""Embedding requests on the owner thread: whose inputs go into a call, and what came of it.

Inputs of several requests go through together, one of each in turn, so that a short request does
not wait for a long one's end.
"""

from __future__ import annotations

import sys
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from superfluid_compat.errors import (
    BadFrame,
    Cancelled,
    Capacity,
    Fatal,
    Fault,
    NotFinite,
    Overloaded,
    StepError,
    SuperfluidError,
)
from superfluid_workerd.adapter import Runtime
from superfluid_workerd.counters import Counters
from superfluid_workerd.link.frames import Embedded, RequestFailed, ToDaemon
from superfluid_workerd.link.refusals import in_words, refusal

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

FLOAT_BYTES: Final = 4
MOST_ANSWER_BYTES: Final = 32 << 20
"""Vectors of one request; a frame holds twice that."""

MOST_PENDING_BYTES: Final = 256 << 20
"""Tokens and vectors of all requests together."""


@dataclass(slots=True, eq=False)
class EmbedJob:
    """A request: its inputs as `rows` of token ids, and the vectors of the first of them.

    `width` is a vector's length. `alone` says that a call failed in which it had company.
    """

    number: int
    rows: Sequence[array[int]]
    width: int
    vectors: list[bytes] = field(default_factory=list)
    alone: bool = False
    cancelled: bool = False

    @property
    def bytes(self) -> int:
        """What it will hold at the most."""
        return FLOAT_BYTES * (sum(map(len, self.rows)) + len(self.rows) * self.width)


@dataclass(frozen=True, slots=True)
class EmbedRejected:
    """An embedding request that its intake refused."""

    number: int
    error: SuperfluidError


_Taken: TypeAlias = list[tuple[EmbedJob, int]]
"""Rows of a call, each by its request and its place there."""


class _Abandoned(Exception):
    """Nobody waits for the call that runs."""


class Embeddings:
    """The embedding requests of one runtime, `most` of them at once.

    `expect` is for the thread that reads the link, all else for the owner thread. `beat` is called
    within calls; it takes what arrived and says whether the loop goes on. `relieve` frees room in
    the runtime, and says whether it did.
    """

    def __init__(
        self,
        runtime: Runtime,
        most: int,
        send: Callable[[ToDaemon], None],
        counters: Counters,
        *,
        beat: Callable[[], bool],
        relieve: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._most = most
        self._send = send
        self._counters = counters
        self._beat = beat
        self._relieve = relieve
        self._live: set[int] = set()
        self._forsaken: set[int] = set()
        self._jobs: deque[EmbedJob] = deque()
        self._seated: Sequence[EmbedJob] = ()
        self._abandoned = False

    def __len__(self) -> int:
        """Requests that wait for a call."""
        return len(self._jobs)

    def expect(self, number: int) -> None:
        """Count request `number` in, before its intake. Raises `Overloaded`, `BadFrame`."""
        if number in self._live:
            raise BadFrame(f"embedding request {number} came while it runs")
        if len(self._live) >= self._most:
            raise Overloaded(f"{self._most} embedding requests run or wait, no more are taken")
        self._live.add(number)

    def add(self, job: EmbedJob) -> None:
        """Into the line."""
        if job.number in self._forsaken:
            self._forget(job.number)
        elif self._jobs and job.bytes + sum(it.bytes for it in self._jobs) > MOST_PENDING_BYTES:
            self.fail(job.number, Overloaded("too many texts wait to be embedded"))
        else:
            self._jobs.append(job)

    def cancel(self, number: int) -> None:
        """Nobody waits for it any more; unknown numbers are ignored."""
        for job in self._jobs:
            if job.number == number:
                job.cancelled = True
                return
        if number in self._live:
            self._forsaken.add(number)

    def fail(self, number: int, error: SuperfluidError) -> None:
        """End the request with `error`."""
        self._forget(number)
        self._send(RequestFailed(request=number, error=refusal(error)))

    def close(self) -> None:
        """End them all."""
        self._jobs.clear()
        for number in list(self._live):
            self.fail(number, Cancelled("the worker is shutting down"))

    def call(self, most: int, *, patient: bool) -> int:
        """Embed what waits, in one call of at most `most` tokens but at least one row; how many
        tokens went through.

        A row that finds no room waits for some when `patient`. Raises `Fatal`.
        """
        self._jobs = deque(job for job in self._jobs if not self._gone(job))
        taken = self._next(most) if self._jobs else []
        while taken:
            try:
                return self._embed(taken)
            except Fatal:
                raise
            except Capacity as error:
                if self._relieve():
                    continue
                if len(taken) > 1:
                    taken = taken[: len(taken) // 2]
                    continue
                if not patient:
                    self._failed(taken, error)
            except Exception as error:  # noqa: BLE001  # recorded; costs the requests an error each
                if not self._abandoned:
                    self._failed(taken, error)
            break
        return 0

    # One call.

    def _gone(self, job: EmbedJob) -> bool:
        if job.cancelled:
            self._forget(job.number)
        return job.cancelled

    def _next(self, most: int) -> _Taken:
        """Rows for a call, one of each request in turn; the request that is first in line goes to
        its end."""
        first = self._jobs[0]
        self._jobs.rotate(-1)
        line = deque([first])
        if not first.alone:
            line += (job for job in list(self._jobs)[:-1] if not job.alone)
        places = {job: len(job.vectors) for job in line}
        taken: _Taken = []
        room = most
        while line:
            job = line.popleft()
            place = places[job]
            tokens = len(job.rows[place])
            if taken and tokens > room:
                continue
            taken.append((job, place))
            room -= tokens
            places[job] = place + 1
            if places[job] < len(job.rows):
                line.append(job)
        return taken

    def _embed(self, taken: _Taken) -> int:
        self._abandoned = False
        self._seated = list(dict.fromkeys(job for job, _ in taken))
        rows = [job.rows[place] for job, place in taken]
        try:
            answer = self._runtime.embed(rows, self._tick)
        finally:
            self._seated = ()
        vectors = checked_vectors(answer, len(rows), taken[0][0].width)
        for (job, _), vector in zip(taken, vectors, strict=True):
            job.vectors.append(vector.astype("<f4").tobytes())
        tokens = sum(map(len, rows))
        self._counters.embed_calls += 1
        self._counters.embedded_inputs += len(rows)
        self._counters.embedded_tokens += tokens
        for job in [it for it in self._jobs if len(it.vectors) == len(it.rows)]:
            self._answer(job)
        return tokens

    def _tick(self) -> None:
        if not self._beat() or all(job.cancelled for job in self._seated):
            self._abandoned = True
            raise _Abandoned

    def _answer(self, job: EmbedJob) -> None:
        self._jobs.remove(job)
        self._forget(job.number)
        if not job.cancelled:
            self._send(
                Embedded(
                    request=job.number,
                    width=job.width,
                    vectors=b"".join(job.vectors),
                    tokens=[len(row) for row in job.rows],
                )
            )

    def _failed(self, taken: _Taken, error: Exception) -> None:
        """A failed call costs a request that was alone in it; several are each tried alone."""
        jobs = list(dict.fromkeys(job for job, _ in taken))
        if len(jobs) > 1:
            print(f"{len(jobs)} requests are embedded apart: {in_words(error)}", file=sys.stderr)
            for job in jobs:
                job.alone = True
            return
        if not isinstance(error, StepError):
            traceback.print_exception(error)
            error = Fault(f"the embedding failed with {in_words(error)}")
        self._jobs.remove(jobs[0])
        self.fail(jobs[0].number, error)

    def _forget(self, number: int) -> None:
        self._live.discard(number)
        self._forsaken.discard(number)


def checked_vectors(answer: Any, rows: int, width: int) -> Logits:
    """`answer` itself, if it is what `Runtime.embed` promises. Raises `Fault`, `NotFinite`."""
    if not isinstance(answer, np.ndarray) or answer.dtype != np.float32:
        found = answer.dtype if isinstance(answer, np.ndarray) else type(answer).__name__
        raise Fault(f"the embedding is of {found}, wanted an array of float32")
    if answer.shape != (rows, width):
        raise Fault(f"the embedding has shape {answer.shape}, wanted ({rows}, {width})")
    if not np.isfinite(answer).all():
        raise NotFinite(
            "the model's embedding holds values that are no numbers: its weights are damaged or "
            "its numbers overflow"
        )
    return answer


__all__ = ["EmbedJob", "EmbedRejected", "Embeddings", "checked_vectors"]

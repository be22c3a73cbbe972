"""Requests with one answer: who gets them, and how many deaths they outlive."""

from __future__ import annotations

import itertools

import pytest

from superfluid.supervisor.requests import Asked, Requests
from superfluid.supervisor.resume import FAULT, OUTSIDE, SUSPECT
from superfluid_compat.errors import FrameTooLarge, WorkerDied
from superfluid_workerd.link.frames import (
    Cancel,
    Detokenize,
    Detokenized,
    Ping,
    Pong,
    ToWorker,
)

DIED = WorkerDied("gone")


class Desk:
    """Requests over a worker that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.requests = Requests(self._send, itertools.count(1))
        self.full = False

    def _send(self, message: ToWorker) -> None:
        if self.full:
            raise FrameTooLarge("no frame holds it")
        self.sent.append(message)

    def ask(self) -> Asked:
        asked = Asked(lambda number: Detokenize(request=number, tokens=[7]), Detokenized)
        self.requests.hold(asked)
        self.requests.pump()
        return asked

    def die(self, *, outside: bool) -> None:
        self.requests.died(outside=outside)
        self.requests.condemn(DIED)
        self.requests.pump()


@pytest.mark.parametrize(
    ("deaths", "survives"),
    [
        ([False], True),
        ([False, False], False),
        ([True] * (SUSPECT // OUTSIDE - 1), True),
        ([True] * (SUSPECT // OUTSIDE), False),
        ([False, *[True] * (FAULT // OUTSIDE - 1)], True),
        ([False, *[True] * (FAULT // OUTSIDE)], False),
    ],
)
async def test_it_outlives_one_fault_or_kills_that_come_to_less_than_two(
    deaths: list[bool], survives: bool
) -> None:
    desk = Desk()
    asked = desk.ask()
    for outside in deaths:
        assert not asked.answer.done()
        desk.die(outside=outside)
    if survives:
        desk.requests.answered(len(deaths) + 1, Detokenized(request=0, text="there"))
        assert (await asked.answer).text == "there"
    else:
        with pytest.raises(WorkerDied):
            await asked.answer
    assert len(desk.requests) == 0
    assert len(desk.sent) == len(deaths) + survives


async def test_what_asks_a_worker_about_itself_ends_with_it_and_explains_nothing() -> None:
    desk = Desk()
    ping = Asked(lambda number: Ping(number=number), Pong, fleeting=True)
    desk.requests.start(ping)
    desk.requests.died(outside=True)
    assert not desk.requests.guilty
    desk.requests.condemn(DIED)
    with pytest.raises(WorkerDied):
        await ping.answer


async def test_who_leaves_is_withdrawn_wherever_it_stands() -> None:
    desk = Desk()
    sent, held = desk.ask(), desk.ask()
    desk.requests.withdraw(sent)
    assert desk.sent[-1] == Cancel(stream=1)
    desk.requests.died(outside=False)
    desk.requests.withdraw(held)
    desk.requests.pump()
    assert len(desk.requests) == 0
    assert len(desk.sent) == 3


async def test_what_no_frame_holds_fails_alone() -> None:
    desk = Desk()
    desk.full = True
    asked = desk.ask()
    with pytest.raises(FrameTooLarge):
        await asked.answer
    assert len(desk.requests) == 0

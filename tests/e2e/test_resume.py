"""Streams outlive their workers: killed at random under load, each gets what it would have got."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from superfluid_adapter_fake.orders import Moment, Orders

from superfluid.supervisor.states import WorkerState
from superfluid_compat.errors import WorkerDied
from superfluid_workerd.link.frames import GenerationRequest, Sampling, Text
from support.house import SCRIPT, Open, continued, reaches
from support.kills import PATIENT, SOAK, STREAMS, Killer, listen, undisturbed

POISON = "\x01"
SPARING = Orders(context=4096, poison=POISON, step_s=0.001)


def request(number: int, tokens: int) -> GenerationRequest:
    """A stream of its own: prompt, seed, stop string, log probabilities."""
    return GenerationRequest(
        prompt=Text(text=f"prompt {number}: ¡häß! " + "x" * (number * 7 % 90), add_special=False),
        sampling=Sampling(temperature=1.0, seed=number, logprobs=number % 3 or None),
        max_tokens=tokens,
        stop=("zq", "e~") if number % 2 else (),
    )


@pytest.mark.parametrize(("kills", "seed"), [(12, 8), *SOAK])
async def test_random_kills_under_load_change_nothing(
    house: Open, tmp_path: Path, kills: int, seed: int
) -> None:
    requests = [request(number, 60 + 11 * number) for number in range(STREAMS)]
    wanted = await undisturbed(house(SPARING), requests)
    killer = Killer(house(SPARING, limits=PATIENT, folder=tmp_path / "disturbed"), requests, seed)
    await killer.run(kills)
    for answers, alone in zip(killer.answers, wanted, strict=True):
        assert all(heard == alone for heard in answers)
    print(f"{kills} kills, {sum(map(len, killer.answers))} answers")


async def test_the_prompt_that_kills_the_engine_fails_alone(house: Open, tmp_path: Path) -> None:
    requests = [request(number, 300) for number in range(STREAMS)]
    wanted = await undisturbed(house(SPARING), requests)
    served = house(SPARING, folder=tmp_path / "disturbed")
    clients = [asyncio.create_task(listen(served, each)) for each in requests]
    await reaches(served, WorkerState.SERVING)
    killer = with_prompt(requests[0], "kill" + POISON)
    with pytest.raises(WorkerDied) as caught:
        await listen(served, killer)
    dossier = served.dossier()
    assert caught.value.dossier == dossier.id
    assert "the one stream it had failed" in dossier.then
    assert await asyncio.gather(*clients) == wanted
    assert served.dossiers() == 3


async def test_a_long_prompt_that_gets_further_each_time_is_no_suspect(
    house: Open, tmp_path: Path
) -> None:
    moments = tuple(
        Moment(act="signal", signal="SIGSEGV", tokens=tokens, once=str(tmp_path / f"at {tokens}"))
        for tokens in (200, 500, 800)
    )
    served = house(Orders(context=2048, script=SCRIPT, moments=moments), limits=PATIENT)
    assert await served.text(13, "x" * 1000) == continued(13, after=1000)
    assert served.dossiers() == 3


async def test_two_that_kill_are_both_found_and_the_next_is_served(house: Open) -> None:
    served = house(msgspec.structs.replace(SPARING, script=SCRIPT), limits=PATIENT)
    assert await served.text() == continued(13)
    killers = [listen(served, with_prompt(request(n, 9), f"{n}" + POISON)) for n in range(2)]
    answers = await asyncio.gather(*killers, served.text(40), return_exceptions=True)
    assert [type(each) for each in answers] == [WorkerDied, WorkerDied, str]
    assert answers[2] == continued(40)
    assert await served.text() == continued(13)


async def test_a_worker_that_never_served_ends_in_giving_up_all_the_same(house: Open) -> None:
    served = house(SPARING)
    with pytest.raises(WorkerDied):
        await listen(served, with_prompt(request(0, 9), POISON))
    await served.supervisor.over()
    assert served.host.state is WorkerState.GAVE_UP


async def test_what_comes_while_no_worker_serves_waits(house: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    served = house(Orders(script=SCRIPT, load_gate=str(gate)))
    await served.supervisor.served()
    gate.unlink()
    os.kill(served.note(), signal.SIGKILL)
    await reaches(served, WorkerState.MAPPED)
    waiting = [asyncio.create_task(served.text(20)) for _ in range(6)]
    asking = asyncio.create_task(
        served.supervisor.tokenize("m", Text(text="t", add_special=False), special=False)
    )
    gate.touch()
    assert set(await asyncio.gather(*waiting)) == {continued(20)}
    assert (await asking).tokens == [ord("t")]


async def test_a_client_that_leaves_while_no_worker_serves_is_forgotten(
    house: Open, tmp_path: Path
) -> None:
    gate, once = tmp_path / "gate", tmp_path / "once"
    gate.touch()
    moment = Moment(act="signal", tokens=10, once=str(once))
    served = house(Orders(script=SCRIPT, load_gate=str(gate), moments=(moment,)))
    wanted = GenerationRequest(prompt=Text(text="ab"), sampling=Sampling(temperature=0.0))
    stream = await served.supervisor.generate("m", wanted)
    gate.unlink()
    await reaches(served, WorkerState.MAPPED)
    await stream.close()
    gate.touch()
    assert await served.text() == continued(13)
    assert served.host.stats.admitted == 1


async def test_a_deadline_goes_on_through_a_restart(house: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    moment = Moment(act="signal", tokens=10, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, load_gate=str(gate), moments=(moment,)))
    await served.supervisor.served()
    gate.unlink()
    wanted = GenerationRequest(
        prompt=Text(text="ab"), sampling=Sampling(temperature=0.0), deadline_s=1.0
    )
    listening = asyncio.create_task(listen(served, wanted))
    await reaches(served, WorkerState.MAPPED)
    await asyncio.sleep(1.0)
    gate.touch()
    assert (await listening).ends == [("cancelled", None)]


def with_prompt(wanted: GenerationRequest, text: str) -> GenerationRequest:
    return msgspec.structs.replace(wanted, prompt=Text(text=text, add_special=False), stop=())

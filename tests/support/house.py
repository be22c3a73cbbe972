"""One model's host over real workers, the fake adapter's if not told, and what is left after it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
from superfluid_adapter_fake.orders import Orders, write_model

from superfluid.catalog.environment import worker_environment
from superfluid.catalog.workerd import Workerd, shipped
from superfluid.supervisor.dossiers import Dossier, Dossiers
from superfluid.supervisor.host import Folders, ModelHost, ModelSpec
from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import WorkerState
from superfluid.supervisor.supervisor import Supervisor
from superfluid_workerd.link.frames import GenerationRequest, Load, Sampling, Text

GREEDY = Sampling(temperature=0.0)
SCRIPT = "Hello world. "
QUICK = Limits(backoff_s=0.01, failures=3)


def continued(tokens: int, after: int = 2) -> str:
    """What greedy decoding of the script adds to a prompt of `after` bytes."""
    return "".join(SCRIPT[index % len(SCRIPT)] for index in range(after, after + tokens))


class House:
    """One model's host, and what a test wants to know of it."""

    def __init__(self, folder: Path, spec: ModelSpec, limits: Limits) -> None:
        self.folders = Folders(folder / "scratch", folder / "dossiers", folder / "ledger")
        self.host = ModelHost(spec, self.folders, limits, wait_s=60.0)
        self.supervisor = Supervisor([self.host])
        self.pids: set[int] = set()

    async def text(self, tokens: int = 13, prompt: str = "ab") -> str:
        """What greedy decoding adds to `prompt`."""
        request = GenerationRequest(
            prompt=Text(text=prompt, add_special=False), sampling=GREEDY, max_tokens=tokens
        )
        stream = await self.supervisor.generate("m", request)
        if self.host.pid is not None:
            self.pids.add(self.host.pid)
        return "".join([delta.text async for delta in stream])

    def note(self) -> int:
        assert self.host.pid is not None
        self.pids.add(self.host.pid)
        return self.host.pid

    def dossier(self) -> Dossier:
        found = Dossiers(self.folders.dossiers).find("last")
        assert found is not None
        return found

    def dossiers(self) -> int:
        return len(list(self.folders.dossiers.glob("*.json")))


Open = Callable[..., House]


def fake_spec(
    folder: Path, orders: Orders | None = None, workerd: Workerd | None = None
) -> ModelSpec:
    """What serves the fake adapter's model, in a folder of its own."""
    workerd, orders = workerd or shipped(), orders or Orders(script=SCRIPT)
    model, shared = write_model(folder / "m.fake", orders), folder / "shared"
    shared.mkdir()
    return ModelSpec(
        name="m",
        runtime="fake",
        load=Load(model=str(model), name="m", scratch="", shared=str(shared), lanes=4),
        command=lambda link: workerd.argv("fake", "serve", "--link", str(link)),
        environment=worker_environment,
        origins={"lanes": {"value": 4, "origin": "flag"}},
    )


HEAD = """
import os, socket, sys, time
from superfluid_workerd.link import framing
from superfluid_workerd.link.frames import *
from superfluid_workerd.link.answers import Facts, Refusal
link = socket.socket(fileno=int(sys.argv[-1]))
reader = framing.to_worker()
def send(message): link.sendall(framing.encode(message))
def read():
    while data := link.recv(65536):
        yield from reader.feed(data)
    os._exit(0)
messages = read()
def greet(): send(Hello(adapter="fake")); next(messages); next(messages)
def ready():
    greet()
    record = LoadRecord(asked={}, got={})
    send(Ready(description=Description(facts=Facts(format="f", architecture="a"), adapter="fake",
        context=9, lanes=1, vocabulary=9, template="none", record=record)))
"""


@contextlib.asynccontextmanager
async def houses(folder: Path) -> AsyncIterator[Open]:
    """Opens a house; afterwards nothing of it is left: no process, no scratch, no entry."""
    opened: list[House] = []
    before, children = _descriptors(), _children()

    def make(
        orders: Orders | None = None,
        *,
        script: str | None = None,
        limits: Limits = QUICK,
        workerd: Workerd | None = None,
        folder: Path = folder,
        spec: ModelSpec | None = None,
    ) -> House:
        workerd = workerd or shipped()
        folder.mkdir(parents=True, exist_ok=True)
        if script is not None:
            source = folder / "worker.py"
            source.write_text(HEAD + textwrap.dedent(script))
            workerd = Workerd((sys.executable, str(source)))
        chosen = spec or fake_spec(folder, orders, workerd)
        opened.append(House(folder, chosen, limits))
        opened[-1].supervisor.start()
        return opened[-1]

    yield make
    for each in opened:
        each.supervisor.halt()
        await each.supervisor.over()
        assert each.host.pid is None
        assert not [pid for pid in each.pids if runs(pid)]
        assert list(each.folders.ledger.iterdir()) == []
        assert not each.folders.scratch.exists() or not list(each.folders.scratch.iterdir())
    assert _descriptors() == before
    assert _children() <= children


async def reaches(served: House, *wanted: WorkerState) -> None:
    """Return when the worker is in one of these states."""
    while served.host.state not in wanted:
        await asyncio.sleep(0.002)


def _descriptors() -> Sequence[str]:
    return sorted(path.name for path in Path("/dev/fd").iterdir())


def _children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def runs(pid: int) -> bool:
    """Whether a process of that pid runs, zombies apart."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

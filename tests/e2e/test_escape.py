"""A model that took over its worker tries to get out of it; the daemon goes on serving another."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from superfluid_adapter_fake.hostile import REPORT
from superfluid_adapter_fake.orders import Moment, Orders, write_model

from superfluid.catalog.environment import worker_environment
from superfluid.catalog.workerd import Workerd, shipped
from superfluid.supervisor import confine
from superfluid.supervisor.host import ModelHost, ModelSpec
from superfluid.supervisor.states import WorkerState
from superfluid_compat.errors import SandboxUnreachable
from superfluid_workerd.link.answers import Facts
from superfluid_workerd.link.answers import Rights as Declared
from superfluid_workerd.link.frames import GenerationRequest, Load, Text
from superfluid_workerd.sandbox.rights import Level, Rights
from support.house import GREEDY, QUICK, SCRIPT, House, Open, continued
from support.server import run, serving


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home with a secret, a model's folder with a link to it, and sockets that listen."""
    home, models = tmp_path / "home", tmp_path / "models"
    home.mkdir()
    models.mkdir()
    (home / "secret").write_text("secret")
    (models / "linked").symlink_to(home / "secret")
    abstract = f"superfluid-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX) as path,
    ):
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        here = Path.cwd()
        os.chdir(home)
        path.bind("s")
        os.chdir(here)
        path.listen()
        yield {
            "secret": str(home / "secret"),
            "link": str(models / "linked"),
            "model": str(models / "m.fake"),
            "port": str(tcp.getsockname()[1]),
            "abstract": abstract,
            "socket": str(home / "s"),
        }


def confined(
    served: House,
    model: Path,
    orders: Orders,
    level: Level,
    declared: Declared | None = None,
    **changes: int,
) -> ModelHost:
    """A host of the same house whose worker is shut in."""
    write_model(model, orders)
    shared = served.folders.scratch.parent / "shared"
    rights = confine.rights(level, declared or Declared(), model, [shared])
    spec = ModelSpec(
        name="hostile",
        runtime="fake",
        load=Load(model=str(model), name="hostile", scratch="", shared=str(model.parent), lanes=2),
        command=lambda link: shipped().argv("fake", "serve", "--link", str(link)),
        environment=worker_environment,
        rights=replace(rights, **changes),  # type: ignore[arg-type]  # bounds, all of them int
    )
    return ModelHost(spec, served.folders, QUICK)


async def beside(served: House) -> dict[str, str]:
    """The worker of the other model, its scratch, and a kernel that workers share."""
    await served.supervisor.served()
    (scratch,) = served.folders.scratch.iterdir()
    (scratch / "private").write_text("secret")
    kernel = served.folders.scratch.parent / "shared" / "kernel"
    kernel.write_text("code")
    return {"sibling": str(served.note()), "scratch": str(scratch), "cache": str(kernel)}


async def outcomes(
    served: House,
    targets: dict[str, str],
    level: Level,
    declared: Declared | None = None,
    **changes: int,
) -> dict[str, str]:
    """What each act came to, while the other model is asked for tokens. An adapter that says it
    starts processes does so while it loads."""
    orders = Orders(
        moments=(Moment(act="escape", tokens=3, targets=targets | await beside(served)),),
        grandchild=os.devnull if declared is not None and declared.spawn else None,
    )
    host = confined(served, Path(targets["model"]), orders, level, declared, **changes)
    host.start()
    await host.served()
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY, max_tokens=4)
    stream = asyncio.create_task(_text(host, request))
    try:
        while not stream.done():
            assert await served.text() == continued(13)
        await stream
        assert host.spawned == 1
        (report,) = served.folders.scratch.glob(f"*/{REPORT}")
        found: dict[str, str] = json.loads(report.read_text())
        return found
    finally:
        host.halt()
        await host.over()


async def _text(host: ModelHost, request: GenerationRequest) -> str:
    return "".join([delta.text async for delta in await host.generate(request)])


async def test_nothing_gets_out_of_a_strict_sandbox(house: Open, targets: dict[str, str]) -> None:
    served = house()
    found = await outcomes(served, targets, "strict", data_bytes=4 << 30, file_bytes=1 << 30)
    assert len(found) > 150
    assert [name for name, outcome in found.items() if outcome == "done"] == []
    home = Path(targets["secret"])
    assert (home.read_text(), home.stat().st_mode & 0o777) == ("secret", 0o644)
    assert sorted(path.name for path in home.parent.iterdir()) == ["s", "secret"]
    assert sorted(path.name for path in Path(targets["model"]).parent.iterdir()) == [
        "linked",
        "m.fake",
    ]
    (scratch,) = served.folders.scratch.iterdir()
    assert [path.name for path in scratch.iterdir()] == ["private"]
    shared = served.folders.scratch.parent / "shared"
    assert [(path.name, path.read_text()) for path in shared.iterdir()] == [("kernel", "code")]


async def test_basic_keeps_files_and_the_network_in(house: Open, targets: dict[str, str]) -> None:
    only = {"only": "read ,write ,list ,connect tcp,connect abstract,signal the daemon"}
    found = await outcomes(house(), targets | only, "basic")
    assert len(found) > 20
    assert [name for name, outcome in found.items() if outcome == "done"] == []


async def test_what_is_tried_can_be_done_without_a_sandbox(
    house: Open, targets: dict[str, str]
) -> None:
    """So that the list above proves something."""
    harmless = ["read a file at home", "list the home", "connect udp", "connect path", "fork",
                "connect abstract", "connect netlink", "signal the daemon", "watch the home",
                "write into the home", "change a mode at home", "run a program", "link to a secret",
                "make a file set-id", "read the daemon's environment", "call pidfd_open",
                "send from a pair of sockets", "start threads", "read a sibling's environment",
                "read a sibling beside", "read a sibling's scratch",
                "signal a sibling", "slow a sibling", "move a sibling", "trace a sibling",
                "copy a sibling", "hold a sibling", "list a sibling", "write into a sibling",
                "write a kernel beside it", "write over a compiled kernel", "listen abstract",
                "type into descriptor 0"]  # fmt: skip
    found = await outcomes(house(), targets | {"only": ",".join(harmless)}, "none")
    assert [name for name, outcome in found.items() if outcome != "done"] == []
    assert len(found) >= len(harmless) - 1


async def test_a_right_to_start_processes_ends_with_the_load(
    house: Open, targets: dict[str, str]
) -> None:
    only = {"only": "fork,run a program,spawn,become,call fork,call vfork,start threads"}
    found = await outcomes(house(), targets | only, "strict", Declared(spawn=True))
    assert len(found) >= 8
    assert [name for name, outcome in found.items() if outcome == "done"] == []


async def test_what_was_started_to_load_a_model_ends_with_the_load(
    house: Open, targets: dict[str, str]
) -> None:
    """It was born under a filter that lets it start more."""
    host = confined(
        house(), Path(targets["model"]), Orders(strays=3), "strict", Declared(spawn=True)
    )
    host.start()
    try:
        await host.served()
        assert host.pid is not None
        children = psutil.Process(host.pid).children()
        while any(it.status() != psutil.STATUS_ZOMBIE for it in children):
            await asyncio.sleep(0.01)
        request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY, max_tokens=4)
        assert await _text(host, request)
    finally:
        host.halt()
        await host.over()


async def test_memory_has_a_bound(house: Open, targets: dict[str, str]) -> None:
    found = await outcomes(house(), targets, "strict", data_bytes=2 << 30)
    assert found["take all memory"] == "ENOMEM"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A worker to which the kernel's Landlock is an older one."""
    path = tmp_path / "old.py"
    path.write_text(
        "import superfluid_workerd.sandbox.landlock as landlock\n"
        "landlock.abi = lambda: 3\n"
        "from superfluid_workerd.entry import main\n"
        "main()\n"
    )
    return path


def test_serve_says_what_it_reached_or_refuses(tmp_path: Path, old: Path) -> None:
    home, model = tmp_path / "home", str(write_model(tmp_path / "m.fake", Orders(script=SCRIPT)))
    with serving([model], home) as server:
        (entry,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        record = entry["superfluid"]["record"]
        assert record["asked"]["sandbox"] == "auto"
        assert record["got"]["sandbox"]["level"] == "strict"
        assert "system call filter" in record["got"]["sandbox"]["by"]
    command = f"{sys.executable} -P {old}"
    arguments = ["serve", model, "--sandbox", "strict"]
    refused = run(arguments, home, SUPERFLUID_WORKER_FAKE=command)
    assert (refused.code, refused.out) == (4, "")
    assert "a strict sandbox was asked for and basic is what this machine gives" in refused.err
    assert "choose a sandbox level that this machine reaches" in refused.err


async def test_nothing_reads_a_model_below_the_level_that_was_asked_for(
    tmp_path: Path, old: Path
) -> None:
    model = write_model(tmp_path / "m.fake", Orders(script=SCRIPT))
    words, command = ["facts", str(model)], (sys.executable, "-P", str(old))
    best = await Workerd(command).ask("fake", words, Facts, timeout_s=60, model=model)
    assert best.format == "fake"
    with pytest.raises(SandboxUnreachable, match="a strict sandbox was asked for"):
        await Workerd(command, "strict").ask("fake", words, Facts, timeout_s=60, model=model)


async def test_a_level_that_cannot_be_had_is_refused_with_the_reason(
    house: Open, targets: dict[str, str], old: Path
) -> None:
    served = house()
    host = confined(served, Path(targets["model"]), Orders(script=SCRIPT), "strict")
    argv = shipped().argv("fake", "serve")
    host = ModelHost(
        replace(
            host.spec,
            command=lambda link: [
                sys.executable, "-P", str(old), *argv[4:], "--link", str(link)
            ],
        ),
        served.folders,
        QUICK,
    )  # fmt: skip
    host.start()
    with pytest.raises(SandboxUnreachable, match=r"basic is what this machine gives.*ABI 6") as c:
        await host.served()
    assert c.value.exit_code == 4
    assert host.state is WorkerState.GAVE_UP
    softer = ModelHost(
        replace(host.spec, rights=replace(host.spec.rights or Rights(), level="auto")),
        served.folders,
        QUICK,
    )
    softer.start()
    await softer.served()
    reached = softer.sandbox()
    assert (reached["asked"], reached["level"]) == ("auto", "basic")
    assert "Landlock ABI 6 (scoped signals and sockets)" in reached["missing"]
    softer.halt()
    await softer.over()

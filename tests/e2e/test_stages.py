"""A worker that fails on any rung of its way up is buried at that rung, and the next one serves."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from superfluid.supervisor import process, worker
from superfluid.supervisor.dossiers import Dossier
from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import LADDER, WorkerState
from support.house import Open, reaches

ACTS = {
    "SIGKILL": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    "SIGSTOP": ("os.kill(os.getpid(), 19); time.sleep(3600)", "made no progress for 1 s while {}"),
    "exit": ("os._exit(1)", "exited with code 1"),
    "closed link": ("link.close(); time.sleep(3600)", "closed its link and stayed"),
    "half a frame": (
        "link.sendall((100).to_bytes(4, 'big') + b'half'); os._exit(0)",
        "exited with code 0",
    ),
    "garbage": ("link.sendall(b'\\xff' * 64); time.sleep(3600)", "frame"),
}
"""What goes wrong, and what the dossier says of it."""

SCRIPT = """
once = {once!r}
def here(stage):
    if stage == {stage!r}:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        {act}
here("spawned")
greet()
here("handshaken")
for stage in ("probed", "mapped", "warmed"):
    send(Stage(stage=stage))
    here(stage)
record = LoadRecord(asked={{}}, got={{}})
send(Ready(description=Description(facts=Facts(format="f", architecture="a"), adapter="fake",
    context=9, lanes=1, vocabulary=9, template="none", record=record)))
here("serving")
for message in messages:
    if isinstance(message, Ping):
        send(Pong(number=message.number, ticks=1, stats=TurnStats()))
    if isinstance(message, Shutdown):
        os._exit(0)
"""


@pytest.mark.parametrize("stage", LADDER)
@pytest.mark.parametrize("how", ACTS)
async def test_a_failure_at_any_stage_is_buried_there_and_the_next_worker_serves(
    how: str, stage: WorkerState, house: Open, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(process, "TERM_GRACE_S", 0.1)
    monkeypatch.setattr(worker, "_STAY_S", 0.1)
    act, reason = ACTS[how]
    once = tmp_path_factory.mktemp("once") / "done"
    limits = Limits(
        still_s=dict.fromkeys(LADDER, 60.0) | ({stage: 1.0} if how == "SIGSTOP" else {}),
        ping_s=0.2,
        backoff_s=0.01,
        backoff_most_s=0.05,
        failures=1000,
    )
    script = SCRIPT.format(once=str(once), stage=stage.value, act=act)
    served = house(script=script, limits=limits)
    while served.dossiers() == 0:
        await asyncio.sleep(0.005)
    await reaches(served, WorkerState.SERVING)
    kept = [
        msgspec.json.decode(path.read_bytes(), type=Dossier)
        for path in served.folders.dossiers.glob("*.json")
    ]
    wanted = reason.format(stage.value)
    assert any(it.stage == stage and wanted in it.reason for it in kept), kept

"""Every single thing that the canary asks for decides, and nothing of it is left when it is ended.

The library is a stand-in that does all as its contract says, or all but one thing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp.contained import ask
from superfluid_adapter_llamacpp.contracts import contracts, served
from superfluid_adapter_llamacpp.probe import examine
from support.llama_libraries import BUILDS, INSTALLED, contract, library
from support.llama_standin import FAULT, FAULTS, build

SEVEN = contracts()[7]
CANARY = "superfluid_adapter_llamacpp.canary"
SERVED = [INSTALLED, *(name for name, one in BUILDS.items() if one.contract in served())]


@pytest.fixture(scope="module")
def singing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("singing")
    return build(folder / "libllama.so", contract=SEVEN, sings=True)


@pytest.mark.parametrize("number", served())
def test_a_library_that_goes_by_its_contract_sings(number: int, tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=contracts()[number], sings=True)
    found = examine(path)
    assert (found.contract, found.reason, found.sentence) == (number, None, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_it_does_otherwise_is_said(
    fault: str, singing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, fault)
    found = examine(singing)
    assert (found.contract, found.reason) == (7, "canary-failed")
    assert found.sentence.endswith(f"but not its behaviour: {FAULTS[fault]}")


@pytest.mark.parametrize("name", SERVED)
def test_nothing_is_printed_by_a_build_that_sings(name: str) -> None:
    ended = ask([CANARY, str(library(name)), str(contract(name))], 60.0)
    assert (ended.lines, ended.said, ended.how) == ([b'{"wrong":""}'], "", "")


# What is left of it.

HANGS = 'FILE *f = fopen("{pipe}", "w"); fprintf(f, "%d", getpid()); fclose(f); for (;;) pause();'
EXAMINE = """
import signal, sys
from pathlib import Path
from superfluid_adapter_llamacpp.probe import examine
signal.signal(signal.SIGINT, signal.default_int_handler)
examine(Path(sys.argv[1]), Path(sys.argv[2]), limit_s=3600.0)
"""
EXAMINE_IGNORING = """
import sys
from pathlib import Path
from superfluid_adapter_llamacpp.probe import examine
print(examine(Path(sys.argv[1]), limit_s=3600.0).reason)
"""


@pytest.mark.parametrize("stage", ["evidence", "canary"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_nothing_is_left_when_who_asked_is_ended(
    group: bool, number: signal.Signals, stage: str, tmp_path: Path
) -> None:
    pipe, temporary, cache = (tmp_path / name for name in ("pipe", "temporary", "cache"))
    os.mkfifo(pipe)
    temporary.mkdir()
    cache.mkdir()
    hangs = HANGS.format(pipe=pipe)
    body = f"void *llama_model_load_from_file(const char *path) {{ {hangs} }}"
    path = build(
        tmp_path / "libllama.so",
        contract=SEVEN,
        at_load=hangs if stage == "evidence" else "",
        instead={"llama_model_load_from_file": body} if stage == "canary" else {},
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", EXAMINE, str(path), str(cache)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    trial = os.pidfd_open(int(pipe.read_text()))
    (os.killpg if group else os.kill)(asker.pid, number)
    asker.wait()
    select.select([trial], [], [])
    os.close(trial)
    assert [*temporary.iterdir(), *cache.iterdir()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_who_asked_ignores_ends_nothing(number: signal.Signals, tmp_path: Path) -> None:
    sent = f"kill(0, {number.value});"
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True, at_load=sent)
    script = f"import signal\nsignal.signal({number.value}, signal.SIG_IGN)\n{EXAMINE_IGNORING}"
    words = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout == "None\n"


def test_what_was_left_half_written_goes_with_the_next_finding(
    singing: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / ".probe-old", tmp_path / ".probe-new"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert examine(singing, tmp_path).reason is None
    assert not old.exists()
    assert new.exists()


def test_who_asked_and_is_gone_already_is_not_answered(singing: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", CANARY, str(singing), "7"],
        env={**os.environ, "SUPERFLUID_LLAMA_ASKER": "1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")

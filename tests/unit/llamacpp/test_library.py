"""How a library is read and loaded: what it needs, what it finds set, whom it hears."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp.contained import ask
from superfluid_adapter_llamacpp.contracts import contracts, served
from superfluid_adapter_llamacpp.evidence import present_glibc
from superfluid_adapter_llamacpp.probe import examine
from support.llama_libraries import BUILDS, INSTALLED, library
from support.llama_standin import build

SEVEN = contracts()[7]
SERVED = [INSTALLED, *(name for name, one in BUILDS.items() if one.contract in served())]


def run(script: str, *words: Path) -> subprocess.CompletedProcess[str]:
    """`script` in a process of its own, in which nothing of llama.cpp is set or loaded."""
    environment = {name: value for name, value in os.environ.items() if "GGML" not in name}
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# The file, and those beside it.


def test_a_newer_glibc_of_a_libggml_beside_it_is_named(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True)
    data = library(INSTALLED).read_bytes()
    assert b"\0GLIBC_2.17\0" in data
    beside = tmp_path / "libggml-cpu.so"
    beside.write_bytes(data.replace(b"\0GLIBC_2.17\0", b"\0GLIBC_9.17\0"))
    found = examine(path)
    present = ".".join(map(str, present_glibc()))
    assert found.reason == "cannot-load"
    assert f"needs glibc 9.17, this machine has {present}" in found.sentence


@pytest.mark.parametrize("member", ["n_ctx", "yarn_ext_factor", "samplers"])
def test_a_member_that_is_not_written_is_no_member(member: str, tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, holes=[member])
    found = examine(path)
    first = SEVEN.context.fields[member].offset
    assert found.reason == "unknown-abi"
    assert f"context defaults: byte {first} is not written" in found.sentence


# Loading it.

LOAD = """
import sys
from pathlib import Path
from superfluid_adapter_llamacpp.library import NotLoadable, load
"""
SILENT = f"""{LOAD}
from superfluid_adapter_llamacpp.params import default_bytes
from superfluid_adapter_llamacpp.symbols import Params
from superfluid_adapter_llamacpp.tiny import tiny_model
call = load(Path(sys.argv[1])).call
Path(sys.argv[2]).write_bytes(tiny_model())
params = Params.from_buffer_copy(default_bytes(call.llama_model_default_params))
loaded = call.llama_model_load_from_file(sys.argv[2].encode(), params)
params = Params.from_buffer_copy(default_bytes(call.llama_context_default_params))
print(bool(call.llama_init_from_model(loaded, params)), flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("name", SERVED)
def test_a_build_is_silent_with_a_model(name: str, tmp_path: Path) -> None:
    done = run(SILENT, library(name), tmp_path / "tiny.gguf")
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("devices", ["1", "loaded"], ids=["built in", "from its folder"])
def test_it_is_heard_before_its_backends_load(devices: str, tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True, devices=devices)
    done = run(f"{LOAD}print(len(load(Path(sys.argv[1])).devices()))", path)
    assert (done.stdout, done.stderr) == ("1\n", "")
    words = ["superfluid_adapter_llamacpp.evidence", "--stages", str(path)]
    assert ask(words, 60.0).said == ""


def test_its_last_errors_are_kept(tmp_path: Path) -> None:
    lines: Mapping[int, str] = {2: "so far so good", 4: "no room", 5: " at all", 1: "a detail"}
    speak = "".join(f'heard({level}, "{text}\\n", 0);' for level, text in lines.items())
    body = f"void llama_backend_init(void) {{ {speak} }}"
    path = build(tmp_path / "libllama.so", contract=SEVEN, instead={"llama_backend_init": body})
    script = f"{LOAD}log = load(Path(sys.argv[1])).log; print(log.reason('nothing'))\n"
    script += "log.clear(); print(log.reason('nothing'))"
    assert run(script, path).stdout == "no room at all\nnothing\n"


def test_who_loads_it_again_hears_it_again(tmp_path: Path) -> None:
    path = build(tmp_path / "libllama.so", contract=SEVEN, sings=True)
    script = f"{LOAD}path = Path(sys.argv[1]); first = load(path)\n"
    script += "first.call.llama_log_set(None, None); print(load(path) is first)\n"
    script += "first.call.llama_backend_init()"
    done = run(script, path)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_process_holds_one_library(tmp_path: Path) -> None:
    one, two = (build(tmp_path / f"{name}.so", contract=SEVEN) for name in ("one", "two"))
    script = f"{LOAD}load(Path(sys.argv[1]))\n"
    script += "try: load(Path(sys.argv[2]))\nexcept NotLoadable as error: print(error)"
    assert run(script, one, two).stdout == (
        f"{one} is loaded already, a process holds one llama.cpp\n"
    )


ALONE = 'const char *set = getenv("GGML_NO_BACKTRACE"); if (!set || strcmp(set, "1")) abort();'


def test_no_debugger_is_started_on_it(tmp_path: Path) -> None:
    """llama.cpp attaches one at an assertion, unless the variable says otherwise at the start."""
    path = build(tmp_path / "libllama.so", contract=SEVEN, at_load=ALONE)
    assert run(f"{LOAD}load(Path(sys.argv[1]))", path).returncode == 0

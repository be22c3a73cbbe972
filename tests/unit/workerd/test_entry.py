"""`superfluid-workerd` as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from superfluid_workerd.link.answers import AdapterInfo, Facts, Probe
from superfluid_workerd.options import Option

ANSWERS = {"info", "options", "compat", "versions"}


def process(
    *command: str, stdin: bytes | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, *command],
        input=stdin,
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )


def run(*words: str, stdin: bytes = b"", path: Path | None = None) -> tuple[int, Any, str]:
    """Exit code, the answer, and stderr."""
    done = process("-P", "-m", "superfluid_workerd", *words, stdin=stdin, path=path)
    return done.returncode, json.loads(done.stdout), done.stderr.decode()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.fake", Orders(context=99))


def test_info_and_options_tell_what_the_adapter_is() -> None:
    code, info, _ = run("fake", "info")
    assert (code, info["id"], info["kit"]) == (0, "fake", 1)
    assert msgspec.convert(info, AdapterInfo).aliases == ("pretend",)
    code, options, _ = run("fake", "options")
    assert [Option.from_description(each).name for each in options] == [
        "mode", "cache-bytes", "broken",
    ]  # fmt: skip
    assert run("fake", "compat")[:2] == (0, {})
    assert run("fake", "versions")[:2] == (0, [])


@pytest.mark.parametrize("command", sorted(ANSWERS))
def test_what_is_data_needs_no_array_library(command: str) -> None:
    script = (
        "import os, sys\n"
        "leave = os._exit\n"
        "def spy(code):\n"
        "    print(*sys.modules, file=sys.stderr, flush=True)\n"
        "    leave(code)\n"
        "os._exit = spy\n"
        "from superfluid_workerd.entry import main\n"
        f"main(['fake', '{command}'])\n"
    )
    done = process("-c", script)
    loaded = set(done.stderr.decode().split())
    assert done.returncode == 0
    assert "superfluid_adapter_fake.fake" in loaded
    assert not loaded & {"numpy", "numba", "jinja2", "asyncio", "superfluid"}


def test_entry_imports_the_standard_library_alone() -> None:
    script = (
        "import sys\nbefore = set(sys.modules)\nimport superfluid_workerd.entry\n"
        "print(*(set(sys.modules) - before))\n"
    )
    done = process("-c", script)
    roots = {name.split(".")[0] for name in done.stdout.decode().split()}
    assert roots - sys.stdlib_module_names == {"superfluid_workerd"}


def test_check_facts_prepare_and_tokenize(tmp_path: Path, model: Path) -> None:
    code, probe, _ = run("fake", "check", "--shared", str(tmp_path))
    assert (code, Probe(**probe).problem) == (0, None)
    code, probe, _ = run(
        "fake", "check", "--shared", str(tmp_path), "--options", '{"broken": true}'
    )
    assert (code, probe["rule"]) == (0, "told")
    code, facts, _ = run("fake", "facts", str(model))
    assert (code, Facts(**facts).context) == (0, 99)
    code, answer, log = run(
        "fake", "prepare", "--shared", str(tmp_path), stdin=json.dumps(facts).encode()
    )
    assert (code, answer) == (0, {})
    assert (tmp_path / "fake.prepared").exists()
    assert "progress 1 of 1" in log
    assert run("fake", "tokenize", str(model), stdin=b"hi")[:2] == (0, [256, 104, 105])
    assert run("fake", "tokenize", str(model), "--plain", "--special", stdin=b"<eos>")[:2] == (
        0, [257],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "stdin", "exit_code", "code", "says"),
    [
        (["fak", "info"], b"", 2, "unknown_adapter", "no runtime is called fak"),
        (["fake"], b"", 2, "usage", "COMMAND"),
        (["fake", "dance"], b"", 2, "usage", "dance"),
        (["fake", "facts"], b"", 2, "usage", "MODEL"),
        (["fake", "serve", "--link", "x"], b"", 2, "usage", "x"),
        (["fake", "facts", "/none"], b"", 3, "model_damaged", "cannot be read"),
        (["fake", "plan", "1.0"], b"", 1, "unsupported", "ships with superfluid"),
        (["fake", "prepare", "--shared", "."], b"{", 2, "usage", "no Facts"),
        (["fake", "check", "--shared", ".", "--options", "["], b"", 2, "bad_option_value", "JSON"),
        (["fake", "check", "--shared", ".", "--options", '{"mode": "x"}'], b"", 2,
         "bad_option_value", "plain, odd"),
        (["fake", "check", "--shared", ".", "--options", '{"nope": 1}'], b"", 2,
         "unknown_option", "nope"),
        (["fake", "serve", "--link", "77"], b"", 1, None, ""),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)  # fmt: skip
def test_what_cannot_be_answered_is_a_refusal(
    words: list[str], stdin: bytes, exit_code: int, code: str | None, says: str
) -> None:
    if code is None:
        done = process("-m", "superfluid_workerd", *words)
        assert (done.returncode, done.stdout) == (exit_code, b"")
        assert b"descriptor 77 is no link" in done.stderr
        return
    found, refusal, log = run(*words, stdin=stdin)
    assert (found, refusal["code"]) == (exit_code, code)
    assert says in refusal["message"]
    assert "\n" not in refusal["message"]
    assert "Traceback" not in log


def test_an_unknown_runtime_is_answered_with_the_nearest() -> None:
    _, refusal, _ = run("fkae", "info")
    assert refusal["fix"] == "did you mean fake?"
    assert "native" in refusal["message"]


BROKEN = {
    "importing": "raise ImportError('no engine here')",
    "factory": "def adapter(): raise ValueError('cannot build')",
    "nothing": "def adapter(): return None",
    "attribute": "adaptor = None",
    "stranger": "from superfluid_adapter_fake.fake import FakeAdapter as adapter",
    "exit": "raise SystemExit(0)",
}
OTHER_KIT = """
import msgspec
from superfluid_adapter_fake.fake import FakeAdapter
class adapter(FakeAdapter):
    def info(self):
        return msgspec.structs.replace(super().info(), id="broken", kit=99)
"""


def _distribution(folder: Path, name: str, runtime: str, source: str) -> None:
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[superfluid.adapters]\n{runtime} = {module}:adapter\n")


@pytest.mark.parametrize("how", sorted(BROKEN))
def test_a_broken_adapter_is_a_refusal_that_names_its_distribution(
    how: str, tmp_path: Path
) -> None:
    _distribution(tmp_path, "their-adapter", "broken", BROKEN[how])
    code, refusal, _ = run("broken", "info", path=tmp_path)
    assert (code, refusal["code"]) == (4, "runtime_broken")
    assert "their-adapter" in refusal["message"]
    assert run("fake", "info", path=tmp_path)[0] == 0


def test_another_kit_number_is_refused_by_number(tmp_path: Path) -> None:
    _distribution(tmp_path, "their-adapter", "broken", OTHER_KIT)
    code, refusal, _ = run("broken", "info", path=tmp_path)
    assert (code, refusal["code"]) == (4, "contract_refused")
    assert "kit 99" in refusal["message"]
    assert "kit 1" in refusal["message"]


def test_two_distributions_of_one_id_are_both_named(tmp_path: Path) -> None:
    _distribution(tmp_path, "their-adapter", "fake", BROKEN["importing"])
    code, refusal, _ = run("fake", "info", path=tmp_path)
    assert (code, refusal["code"]) == (4, "runtime_broken")
    assert "superfluid-adapter-fake and their-adapter" in refusal["message"]


def test_the_rights_are_in_force_when_an_adapter_is_imported(tmp_path: Path) -> None:
    _distribution(
        tmp_path, "their-adapter", "broken",
        "import os, resource, threading\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n"
        "assert os.read(0, 1) == b''\n"
        "assert threading.active_count() == 1\n"
        "print('all as it should be')\n"
        + BROKEN["factory"],
    )  # fmt: skip
    _, refusal, log = run("broken", "info", stdin=b"secret", path=tmp_path)
    assert "cannot build" in refusal["message"]
    assert "all as it should be" in log


def test_a_process_whose_parent_is_another_leaves() -> None:
    done = process("-m", "superfluid_workerd", "--parent", "1", "fake", "info")
    assert (done.returncode, done.stdout) == (1, b"")

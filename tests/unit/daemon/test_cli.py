"""The command line: exit codes, one line for each refusal, options from flags and environment."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from superfluid import cli, logs
from superfluid.cli.serve import split_unknown
from superfluid.cli.settled import adapter_flags, adapter_ids, settled
from superfluid.config import DAEMON, SERVE, adapter_variables, server_name, settle
from superfluid.supervisor.dossiers import Dossier, Dossiers
from superfluid_compat.errors import BadConfig, BadOptionValue, UnknownOption, UsageError
from superfluid_workerd.options import COMMON
from support.server import environment

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """One command in this process: its exit code and what it wrote."""
    monkeypatch.setenv("SUPERFLUID_HOME", str(tmp_path))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (logs.ROOT, "uvicorn")]
    held = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, held, strict=True):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("frobnicate", 2, "No such command"),
        ("models frobnicate", 2, "No such command"),
        ("models pull", 2, "Missing argument"),
        ("models list --frob", 2, "No such option"),
        ("serve --bogus 3", 2, "unknown option --bogus"),
        ("serve --prot 3", 2, "did you mean --port?"),
        ("serve --contxt=3", 2, "did you mean --context?"),
        ("serve --natve-cache-bytes 3", 2, "did you mean --native-cache-bytes?"),
        ("serve --native-cache-bytes", 2, "--native-cache-bytes has no value"),
        ("serve --port", 2, "requires an argument"),
        ("serve --port x", 2, "an integer from 0 to 65535"),
        ("serve --port 65536", 2, "an integer from 0 to 65535"),
        ("serve --lanes 0", 2, "an integer from 1 to 256"),
        ("serve --context -5", 2, "option context was given -5"),
        ("serve --threads 257", 2, "an integer from 0 to 256"),
        ("serve --threads 1.5", 2, "option threads was given '1.5'"),
        ("serve --memory-budget lots", 2, "a size such as"),
        ("serve --log-level loud", 2, "one of debug, info, warning, error"),
        ("serve --log-file /no/such/folder/log", 2, "log file /no/such/folder/log cannot"),
        ("serve --name a/b", 2, "option name was given 'a/b'"),
        ("serve one two", 2, "unexpected extra argument"),
        ("serve /no/such.gguf", 3, "there is no file /no/such.gguf"),
        ("serve gemma-3-270", 3, "did you mean gemma-3-270m?"),
        ("serve --offline", 3, "gemma-3-270m is not stored here and --offline"),
        ("serve --offline org/model", 3, "org/model is not stored here and --offline"),
        ("serve --plan org/model", 3, "org/model is not stored here and --plan fetches nothing"),
        ("runtimes org/model", 3, "run superfluid models pull org/model first"),
        ("runtime install nothing-such", 2, "no runtime is called nothing-such"),
        ("runtime use native", 2, "give an INSTALL or --auto"),
        ("runtime rollback native", 2, "has no install that was in use before"),
        ("runtime remove native", 2, "runtime native has installs none"),
        ("runtime install native", 2, "ships with superfluid"),
        ("config show --config /no/such.toml", 2, "/no/such.toml cannot be read"),
        ("models pull nothing-such", 3, "no model of the shelf"),
        ("models show nothing-such", 3, "no model nothing-such is stored here"),
        ("models remove nothing-such", 3, "no model nothing-such is stored here"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(
    run: Run, arguments: str, code: int, message: str
) -> None:
    found, out, err = run(*arguments.split())
    assert (found, out) == (code, "")
    assert err.startswith("superfluid: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_real_process_ends_with_the_code_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    done = subprocess.run(
        [sys.executable, "-m", "superfluid", "serve", str(tmp_path)],
        env=environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "which no runtime asked reads" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_home_that_cannot_be_made_is_a_clear_refusal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUPERFLUID_HOME", str(tmp_path / "file"))
    code, _, err = run("models", "pull", "gemma-3-270m")
    assert code == 2
    assert "SUPERFLUID_HOME" in err


def test_a_reader_that_left_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "superfluid", "frobnicate"], stderr=write, check=False
    )
    os.close(write)
    assert done.returncode == 2


def test_version_and_help(run: Run) -> None:
    assert run("--version")[:2] == (0, "superfluid 0.1.0\n")
    code, out, _ = run("serve", "--help")
    assert code == 0
    assert all(option.flag() in out for option in SERVE)
    for arguments in ((), ("--help",), ("models",), ("models", "--help")):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "Usage: superfluid" in out


def test_the_shelf_is_listed_before_anything_is_stored(run: Run) -> None:
    code, out, _ = run("models", "list")
    assert code == 0
    assert "gemma-3-270m" in out
    assert "241 MiB" in out
    assert "Gemma Terms of Use" in out
    records = json.loads(run("models", "list", "--json")[1])
    assert [(record["name"], record["stored"]) for record in records] == [("gemma-3-270m", False)]
    shown = json.loads(run("models", "show", "gemma-3-270m", "--json")[1])
    assert shown["files"][0]["size"] == shown["size"] == 253113024
    assert "not stored" in run("models", "show", "gemma-3-270m")[1]


def test_a_flag_beats_the_environment_and_both_beat_the_default() -> None:
    environment = {"SUPERFLUID_LANES": "7", "SUPERFLUID_CONTEXT": "100", "SUPERFLUID_PORT": ""}
    found = settle(SERVE, {"lanes": "3"}, environment)
    assert (found["lanes"].value, found["lanes"].origin) == (3, "flag")
    assert (found["context"].value, found["context"].origin) == (100, "environment")
    assert (found["port"].value, found["port"].origin) == (8453, "default")


def test_a_bad_variable_is_refused_as_a_bad_flag_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERFLUID_LANES", "many")
    code, _, err = run("serve", "--offline")
    assert code == 2
    assert "option lanes was given 'many'" in err


def test_no_option_is_declared_twice() -> None:
    names = [option.name for option in (*DAEMON, *COMMON)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "kept", "extra"),
    [
        (["m", "--x-y", "1"], ["m"], [("--x-y", "1")]),
        (["--x-y=1", "m"], ["m"], [("--x-y", "1")]),
        (["--x-y", "--port", "1"], ["--port", "1"], [("--x-y", None)]),
        (["--port", "--x-y", "m"], ["--port", "--x-y", "m"], []),
        (["--port=1", "--x-y", "-5"], ["--port=1"], [("--x-y", "-5")]),
        (["--offline", "m", "--x-y="], ["--offline", "m"], [("--x-y", "")]),
        (["--", "--x-y", "1"], ["--", "--x-y", "1"], []),
        (["-h"], ["-h"], []),
    ],
)
def test_unknown_flags_are_set_aside_with_their_values(
    arguments: list[str], kept: list[str], extra: list[tuple[str, str | None]]
) -> None:
    assert split_unknown(arguments, {"--port": True, "--offline": False}) == (kept, extra)


def test_an_adapters_flags_and_variables_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "native" in adapter_ids()
    monkeypatch.setenv("SUPERFLUID_NATIVE_CACHE_BYTES", "1G")
    sources = settled(None, {}, [("--native-exact", "on")]).adapters["native"]
    assert list(sources) == [("flag", {"exact": "on"}), ("environment", {"cache-bytes": "1G"})]
    assert adapter_variables("two-words", {"SUPERFLUID_TWO_WORDS_X": "1"}) == {"x": "1"}
    with pytest.raises(UnknownOption):
        adapter_flags([("--exact", "on")], ["native"])
    with pytest.raises(UsageError):
        adapter_flags([("--native-exact", None)], ["native"])


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 65, "a b", "a\n"])
def test_a_servers_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(BadOptionValue):
        server_name(name)
    assert server_name("second-server.1") == "second-server.1"


def test_a_record_is_one_line_whatever_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    logs.set_up(logs.Level.INFO, file)
    logger = logging.getLogger("superfluid.test")
    logger.debug("unseen")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("split\nmessage", extra={"model": "a b", "lanes": 3})
    lines = file.read_text().splitlines()
    assert lines == capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert ' error superfluid.test split message model="a b" lanes=3 traceback="' in lines[0]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_log_file_in_no_folder() -> None:
    with pytest.raises(BadConfig, match="no such file or directory"):
        logs.set_up(logs.Level.INFO, Path("/no/such/folder/log"))


def test_why_tells_of_a_worker_that_never_started(run: Run, tmp_path: Path) -> None:
    dossier = Dossier(
        id="0123abcd", time="2026-01-01T00:00:00+00:00", model="m", runtime="fake", pid=0,
        stage="spawned", reason="could not be started", exit="never started", code=None,
        uptime_s=0.0, peak_rss_bytes=0, options={}, stderr=[],
    )  # fmt: skip
    Dossiers(tmp_path / "state" / "dossiers").write(dossier)
    code, out, _ = run("why", "last")
    assert code == 0
    assert "m on fake, worker -: never started\n" in out
    assert "reason: could not be started\n" in out
    assert json.loads(run("why", "--json")[1])["code"] is None


@pytest.mark.parametrize("arguments", [["serve", "b\udcff.gguf"], ["models", "show", "\udc80"]])
def test_an_argument_that_is_no_utf8_is_refused_in_one_line(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("superfluid: ")
    assert "is no UTF-8, wanted text; rename what it names\n" in err


def test_a_variable_that_is_no_utf8_is_refused_by_name(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERFLUID_LLAMA_LIB", "\udcff.so")
    code, _, err = run("models", "list")
    assert (code, "SUPERFLUID_LLAMA_LIB=\ufffd.so is no UTF-8" in err) == (2, True)


def test_no_record_in_the_log_is_more_than_a_line() -> None:
    record = logging.makeLogRecord({"msg": "a\nb \x1b[2J\udcff", "model": "\x9b\u2028"})
    line = logs.LineFormatter().format(record)
    assert line.isprintable()
    assert "a b" in line

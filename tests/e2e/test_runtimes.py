"""A third party's engine through the real command: verdicts, installs, choices, documents."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import psutil
import pytest
from superfluid_adapter_fake.orders import write_model

from superfluid.catalog import catalog
from superfluid_compat.documents import DOCUMENTS, FOLDER, schema_name, schema_text
from superfluid_workerd.link.answers import InstallPlan, Wheel
from support import tiny_models
from support.chunk_wheels import serving_index
from support.disks import small_disk
from support.engine import (
    Engine,
    FileServer,
    build_wheel,
    library,
    make_environment,
    release,
    serving_files,
    tarball,
)
from support.server import serving


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    make_environment(folder, wheel)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native runtime's kernels stay compiled from test to test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def engine(installed: Path, cache: Path, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(installed, installed / "bin" / "python", tmp_path / "home")
    made.home.mkdir()
    (made.home / "cache").symlink_to(cache)
    yield made
    logger = logging.getLogger("superfluid")
    logger.handlers.clear()
    for left in (*installed.glob("hold-*"), installed / "engine-recipe.json"):
        left.unlink(missing_ok=True)


@pytest.fixture
def files(tmp_path: Path, engine: Engine) -> Iterator[FileServer]:
    with serving_files(tmp_path / "files") as server:
        engine.extra["SSL_CERT_FILE"] = str(server.certificate)
        yield server


def folder_with(tmp_path: Path, name: str = "given", **about: Any) -> Path:
    library(tmp_path / name / "lib" / "libengine.so", **about)
    return tmp_path / name


# Documents


def golden(document: Any, name: str) -> None:
    schema = json.loads((FOLDER / schema_name(name)).read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_the_shipped_schemas_are_those_of_the_documents(name: str) -> None:
    assert (FOLDER / schema_name(name)).read_text("utf-8") == schema_text(name)


def test_a_third_partys_adapter_shows_up_everywhere(engine: Engine, files: FileServer) -> None:
    engine.offer(release(files, "2.1"), release(files, "2.0"), here="it needs a newer kernel")
    compat = engine.json("compat")
    golden(compat, "compat")
    assert compat["runtimes"]["engine"] == {
        "distribution": "superfluid-adapter-engine",
        "distribution_version": "2.0.0",
        "version": "2.0.0",
        "kit": 1,
        "requires": {
            "what": "engine ABI",
            "numbers": [2],
            "unnumbered": [{"versions": "0.3", "number": 2}, {"versions": "0.1", "number": 1}],
            "tested": ["2.0", "2.1"],
        },
        "formats": ["fake"],
        "installs": [
            {"version": "2.1", "backend": "cpu", "contract": 2},
            {"version": "2.0", "backend": "cpu", "contract": 2},
        ],
        "contract": {"symbols": ["engine_version"]},
        "problem": None,
    }
    runtimes = engine.json("runtimes")
    golden(runtimes, "runtimes")
    assert {row["id"] for row in runtimes["runtimes"]} >= {"engine", "fake", "native"}
    (row,) = engine.rows()
    options = row.pop("options")
    assert row == {
        "id": "engine",
        "install": None,
        "state": "not-installed",
        "rule": "not-installed",
        "problem": "found no install, wanted an install",
        "fix": "run superfluid runtime install engine",
        "version": "",
        "abi": None,
        "requires": compat["runtimes"]["engine"]["requires"],
        "formats": ["fake"],
        "devices": [],
        "sandbox": row["sandbox"],
        "installable": "2.0-cpu",
        "in_use": False,
        "pinned": False,
        "aliases": ["motor"],
        "distribution": "superfluid-adapter-engine",
    }
    versions = engine.json("runtime", "versions", "engine")
    golden(versions, "versions")
    assert versions["versions"] == [
        {
            "version": "2.1",
            "backend": "cpu",
            "contract": 2,
            "installs_here": False,
            "reason": "it needs a newer kernel",
            "installed": False,
        },
        {
            "version": "2.0",
            "backend": "cpu",
            "contract": 2,
            "installs_here": True,
            "reason": None,
            "installed": False,
        },
    ]
    declared = engine.json("runtime", "options", "motor")
    golden(declared, "options")
    assert declared["options"] == options
    assert options[1] == {
        "name": "gear",
        "flag": "--engine-gear",
        "variable": "SUPERFLUID_ENGINE_GEAR",
        "type": "integer",
        "help": "nothing depends on it",
        "default": 3,
        "minimum": 1.0,
        "maximum": 6.0,
        "choices": [],
        "keywords": [],
        "unit": "",
        "scope": "model",
    }
    for command in (["runtimes"], ["compat"], ["runtime", "versions", "engine"]):
        ended = engine(*command)
        assert ended.code == 0
        assert "2.0" in ended.out
    assert files.asked == []


def test_a_broken_adapter_is_a_row_and_the_others_work(
    engine: Engine, wheel: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "venv"
    python = make_environment(folder, wheel)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "their_adapter.py").write_text("raise ImportError('half of it is missing')")
    info = site / "their_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[superfluid.adapters]\nbad = their_adapter:adapter\n")
    other = Engine(folder, python, tmp_path / "home")
    found = {row["id"]: row for row in other.json("runtimes")["runtimes"]}
    assert (found["bad"]["state"], found["bad"]["rule"]) == ("broken", "adapter-failed")
    assert "their-adapter" in found["bad"]["problem"]
    assert found["fake"]["state"] == "ready"
    compat = other.json("compat")
    golden(compat, "compat")
    assert "half of it is missing" in compat["runtimes"]["bad"]["problem"]
    assert compat["runtimes"]["native"]["problem"] is None
    ended = other("serve", str(write_model(tmp_path / "m.fake")), "--runtime", "bad", "--plan")
    assert ended.code == 4
    # It might have been the one that reads this.
    (tmp_path / "m.song").write_text("la la la")
    ended = other("serve", str(tmp_path / "m.song"), "--plan")
    assert ended.code == 4
    assert "no runtime asked reads" in ended.err
    assert "half of it is missing" in ended.err
    assert "reinstall their-adapter" in ended.err


# Verdicts


@pytest.mark.parametrize(
    ("about", "state", "rule", "words"),
    [
        ({"abi": 2}, "ready", "number-equal", []),
        ({"abi": 2, "version": "77.0"}, "ready", "number-equal", []),
        ({"abi": 3}, "refused", "number-differs", ["engine ABI 3", "engine ABI 2"]),
        ({"abi": None, "version": "0.3.1"}, "ready", "version-line", []),
        ({"abi": None, "version": "0.1.9"}, "refused", "number-differs", ["ABI 1", "ABI 2"]),
        ({"abi": None, "version": "0.4"}, "refused", "number-unstated", ["no engine ABI", "0.3.x"]),
        ({"abi": 2, "version": "3dev"}, "untested", "build-untested", ["nobody tested"]),
        ({"abi": 2, "devices": 0}, "broken", "no-device", ["no device"]),
    ],
)
def test_a_librarys_verdict(
    engine: Engine,
    tmp_path: Path,
    about: dict[str, Any],
    state: str,
    rule: str,
    words: list[str],
) -> None:
    lib = str(library(tmp_path / "libengine.so", **about))
    (row,) = engine.rows(SUPERFLUID_ENGINE_LIB=lib)
    assert (row["state"], row["rule"], row["abi"]) == (
        state,
        rule,
        about["abi"] if about.get("devices") != 0 else None,
    )
    assert all(word in (row["problem"] or "") for word in words)
    model = str(write_model(tmp_path / "m.fake"))
    ended = engine("serve", model, "--runtime", "engine", "--engine-lib", lib, "--plan")
    assert ended.code == (0 if state == "ready" else 4), ended.err
    assert all(word in ended.err for word in words)
    if state == "untested":
        plan = engine(
            "serve", model, "--runtime", "engine", "--engine-lib", lib, "--untested", "--plan"
        )
        assert plan.code == 0
        assert "untested-allowed" in plan.out


def test_a_text_for_a_library_is_broken(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("no library")
    (row,) = engine.rows(SUPERFLUID_ENGINE_LIB=str(tmp_path / "lib.so"))
    assert (row["state"], row["rule"], row["fix"]) == ("broken", "cannot-load", "reinstall it")


# Installing


def test_install_pin_update_roll_back_repair_remove(
    engine: Engine, files: FileServer, tmp_path: Path
) -> None:
    engine.offer(release(files, "2.0"))
    told = json.loads(engine("runtime", "install", "engine", "--dry-run", "--json").out)
    assert (told["event"], len(told["plans"])) == ("plan", 1)
    dry = engine("runtime", "install", "engine", "--dry-run")
    assert dry.code == 0
    assert "engine-2.0-cpu.tar.gz" in dry.out
    assert files.asked == []
    done = engine("runtime", "install", "engine")
    assert (done.code, done.out) == (0, "engine 2.0-cpu installed\n"), done.err
    assert "is installed already" in engine("runtime", "install", "engine").out
    assert len(files.asked) == 1
    (row,) = engine.rows()
    assert (row["state"], row["install"], row["abi"], row["in_use"]) == (
        "ready",
        "2.0-cpu",
        2,
        True,
    )
    place = engine.runtimes / "2.0-cpu"
    manifest = json.loads((place / "install.json").read_text())
    assert {it["path"] for it in manifest["files"]} == {
        "README", "environment.json", "lib/libengine.so",
    }  # fmt: skip
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not [p for p in place.rglob("*") if p.stat().st_mode & 0o077]

    engine.offer(release(files, "2.1"), release(files, "2.0"))
    assert engine("runtime", "update", "engine").code == 0
    assert [(r["install"], r["in_use"]) for r in engine.rows()] == [
        ("2.1-cpu", True), ("2.0-cpu", False),
    ]  # fmt: skip
    assert engine("runtime", "rollback", "engine").out == "engine uses 2.0-cpu\n"
    assert engine("runtime", "rollback", "engine").code == 2
    assert engine("runtime", "use", "engine", "2.1").out == "engine uses 2.1-cpu\n"
    assert [r["pinned"] for r in engine.rows()] == [True, False]
    assert engine("runtime", "rollback", "engine").out == "engine uses 2.0-cpu\n"
    assert [r["pinned"] for r in engine.rows()] == [False, True]
    assert "another is in use" in engine("runtime", "install", "engine", "--version", "2.1").out
    assert engine("runtime", "use", "engine", "--auto").out == "engine uses 2.1-cpu\n"

    lib = engine.runtimes / "2.1-cpu" / "lib" / "libengine.so"
    assert "whole" in engine("runtime", "repair", "engine").out
    lib.write_bytes(lib.read_bytes()[:-1] + b"?")
    assert "made again" in engine("runtime", "repair", "engine").out
    lib.unlink()
    assert engine.rows()[0]["state"] == "missing"
    assert "repair engine 2.1-cpu" in engine.rows()[0]["fix"]
    assert "made again" in engine("runtime", "repair", "engine", "2.1-cpu").out
    assert engine.rows()[0]["state"] == "ready"

    assert engine("runtime", "remove", "engine").code == 2
    assert engine("runtime", "remove", "engine", "2.1-cpu").code == 0
    assert [r["install"] for r in engine.rows()] == ["2.0-cpu"]
    assert engine("runtime", "remove", "engine").code == 0
    assert engine.rows()[0]["state"] == "not-installed"
    assert sorted(p.name for p in engine.runtimes.iterdir()) == ["current"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version", "9"], 2, "no version 9"),
        (["--version", "2.2"], 2, "did you mean 2.1?"),
        (["--backend", "gpu"], 2, "no backend gpu"),
        (["--version", "2.1"], 4, "does not install on this machine: too old"),
        (["--sha256", "0" * 64], 2, "--sha256 goes with --from"),
        (["--from", "https://127.0.0.1:1/x.tar.gz"], 2, "no known SHA-256"),
        (["--from", "http://127.0.0.1:1/x", "--sha256", "0" * 64], 2, "no https URL"),
        (["--from", "https://127.0.0.1:1/x", "--sha256", "zz"], 2, "no SHA-256 in hex"),
        (["--from", "https://127.0.0.1:1/x", "--sha256", "0" * 64], 4, "cannot be fetched"),
        (["--from", "/no/such"], 2, "there is nothing at /no/such"),
    ],
)
def test_what_cannot_be_installed_says_why(
    engine: Engine, files: FileServer, arguments: list[str], code: int, words: str
) -> None:
    engine.offer(release(files, "2.1"), release(files, "2.0"), here="too old")
    ended = engine("runtime", "install", "engine", *arguments)
    assert ended.code == code, ended.err
    assert words in ended.err
    assert ended.err.count("\n") == 1
    assert files.asked == []
    assert not list(engine.runtimes.glob("*-*"))


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        ("/404", "artifact_unreachable", "answers 404"),
        ("/truncated", "artifact_unreachable", "cannot be fetched"),
        ("/short", "artifact_mismatch", "bytes, wanted"),
        ("/corrupt", "artifact_mismatch", "has SHA-256"),
        ("/endless", "artifact_mismatch", "is longer than"),
        ("/downgrade", "artifact_unreachable", "no https URL"),
        ("/circle", "artifact_unreachable", "redirects"),
        ("/moved", None, ""),
    ],
)
def test_a_server_that_misbehaves(
    engine: Engine, files: FileServer, act: str, code: str | None, words: str
) -> None:
    whole, plan = release(files, "2.0"), release(files, "2.1", path=act)
    content = files.files["/engine-2.1-cpu.tar.gz"]

    def answer(status: int, body: bytes, length: int, **headers: str) -> Any:
        def act(handler: Any) -> None:
            handler.send_response(status)
            handler.send_header("Content-Length", str(length))
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)
            handler.close_connection = True

        return act

    files.acts = {
        "/truncated": answer(200, content[:500], len(content)),
        "/short": answer(200, content[:500], 500),
        "/corrupt": answer(200, b"?" + content[1:], len(content)),
        "/endless": answer(200, content + b"?" * 1000, len(content) + 1000),
        "/downgrade": answer(302, b"", 0, Location="http://127.0.0.1:1/x"),
        "/circle": answer(302, b"", 0, Location="/circle"),
        "/moved": answer(302, b"", 0, Location="/engine-2.1-cpu.tar.gz"),
    }
    engine.offer(whole)
    assert engine("runtime", "install", "engine").code == 0
    engine.offer(plan, whole)
    ended = engine("runtime", "install", "engine", "--json")
    last = json.loads(ended.out.splitlines()[-1])
    if code is None:
        assert (ended.code, last["event"], last["install"]) == (0, "done", "2.1-cpu")
        return
    assert (ended.code, last["event"], last["code"]) == (4, "failed", code), ended.err
    assert words in last["message"]
    assert [(r["install"], r["state"]) for r in engine.rows()] == [("2.0-cpu", "ready")]
    assert not (engine.runtimes / ".staging").exists()


def test_what_a_user_has_installs_from_folder_archive_and_url(
    engine: Engine, files: FileServer, tmp_path: Path
) -> None:
    given = folder_with(tmp_path, version="2.5")
    ended = engine("runtime", "install", "engine", "--from", str(given))
    assert (ended.code, ended.out) == (0, "engine 2.5-local installed\n"), ended.err
    assert "nobody vouches for it" in ended.err
    lib = library(tmp_path / "other.so", version="2.6")
    archive = tmp_path / "engine.tar.gz"
    archive.write_bytes(tarball([("lib/libengine.so", lib.read_bytes())]))
    wrong = engine("runtime", "install", "engine", "--from", str(archive), "--sha256", "0" * 64)
    assert wrong.code == 4
    assert engine("runtime", "install", "engine", "--from", str(archive)).code == 0
    release(files, "2.7")
    files.files["/bare"] = tarball(
        [("lib/libengine.so", (files.folder / "2.7-cpu.so").read_bytes())]
    )
    digest = hashlib.sha256(files.files["/bare"]).hexdigest()
    arguments = ["runtime", "install", "engine", "--from", f"{files.url}/bare", "--sha256", digest]
    assert engine(*arguments, "--backend", "cpu").code == 0
    assert [r["install"] for r in engine.rows()] == ["2.7-cpu", "2.6-local", "2.5-local"]
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    for name, digests in (("2.7-cpu", [digest]), ("2.6-local", [found]), ("2.5-local", [])):
        plan = json.loads((engine.runtimes / name / "install.json").read_text())["plan"]
        assert [it["sha256"] for it in plan["artifacts"]] == digests


def test_what_a_user_gave_under_a_recipes_name_does_not_stand_for_it(
    engine: Engine, files: FileServer, tmp_path: Path
) -> None:
    engine.offer(release(files, "2.0"))
    given = folder_with(tmp_path, version="2.1")
    words = ["--from", str(given), "--version", "2.0", "--backend", "cpu"]
    assert engine("runtime", "install", "engine", *words).code == 0
    ended = engine("runtime", "install", "engine", "--version", "2.0")
    assert ended.code == 4
    assert f"2.0-cpu is here already and holds other files, from {given}" in ended.err
    assert engine("runtime", "remove", "engine", "2.0-cpu").code == 0
    assert engine("runtime", "install", "engine", "--version", "2.0").code == 0
    assert engine.rows()[0]["version"] == "2.0"


def test_an_install_that_fails_its_check_is_none(engine: Engine, tmp_path: Path) -> None:
    good = folder_with(tmp_path)
    assert engine("runtime", "install", "engine", "--from", str(good)).code == 0
    refused: list[tuple[dict[str, Any], str]] = [
        ({"abi": 3}, "contract_refused"),
        ({"version": "3dev"}, "runtime_untested"),
        ({"devices": 0}, "runtime_broken"),
    ]
    for number, (about, code) in enumerate(refused):
        bad = folder_with(tmp_path, f"bad-{number}", **about)
        ended = engine("runtime", "install", "engine", "--from", str(bad), "--json")
        assert (ended.code, json.loads(ended.out.splitlines()[-1])["code"]) == (4, code)
        assert [(r["install"], r["state"]) for r in engine.rows()] == [("2.0-local", "ready")]
    ended = engine("runtime", "install", "engine", "--from", str(tmp_path / "bad-1"), "--untested")
    assert ended.code == 0
    assert "2.0-local stays in use" in ended.err
    rows = {row["install"]: row for row in engine.rows()}
    assert (rows["3dev-local"]["state"], rows["2.0-local"]["in_use"]) == ("untested", True)
    assert engine("runtime", "use", "engine", "--auto").code == 0
    assert {row["install"]: row for row in engine.rows()}["2.0-local"]["in_use"]


def test_an_install_is_not_replaced_by_another_of_its_name(engine: Engine, tmp_path: Path) -> None:
    first = folder_with(tmp_path, "first")
    assert engine("runtime", "install", "engine", "--from", str(first)).code == 0
    again = engine("runtime", "install", "engine", "--from", str(first))
    assert (again.code, [r["install"] for r in engine.rows()]) == (0, ["2.0-local"])
    other = folder_with(tmp_path, "other", version="2.1")
    arguments = ("runtime", "install", "engine", "--from", str(other), "--version", "2.0")
    ended = engine(*arguments)
    assert ended.code == 4
    assert "2.0-local is here already" in ended.err
    assert "superfluid runtime remove engine 2.0-local" in ended.err
    assert engine.rows()[0]["version"] == "2.0"


def test_backends_are_tried_in_turn_while_no_device_is_found(
    engine: Engine, files: FileServer
) -> None:
    engine.offer(
        release(files, "2.0", backend="gpu", devices=0), release(files, "2.0", backend="cpu")
    )
    ended = engine("runtime", "install", "engine")
    assert (ended.code, ended.out) == (0, "engine 2.0-cpu installed\n"), ended.err
    assert "trying the next backend" in ended.err
    assert engine("runtime", "install", "engine", "--backend", "gpu").code == 4
    assert [r["install"] for r in engine.rows()] == ["2.0-cpu"]


def test_workers_that_install_get_no_credentials(engine: Engine, tmp_path: Path) -> None:
    given = folder_with(tmp_path)
    ended = engine(
        "runtime", "install", "engine", "--from", str(given),
        HF_TOKEN="secret", PIP_INDEX_URL="https://user:secret@127.0.0.1/", HTTPS_PROXY="secret",
    )  # fmt: skip
    assert ended.code == 0
    seen = (engine.runtimes / "2.0-local" / "environment.json").read_text()
    assert "PATH" in seen
    assert "secret" not in seen


# Killed, twice at once, no room, no right


def stages(process: subprocess.Popen[str]) -> Iterator[str]:
    for line in process.stdout or ():
        event = json.loads(line)
        if event["event"] == "stage":
            yield event["stage"]


@pytest.mark.parametrize("stage", ["plan", "fetch", "unpack", "finish", "check", "place"])
def test_an_installer_killed_at_any_stage_leaves_what_stood(
    engine: Engine, files: FileServer, stage: str
) -> None:
    first, second = release(files, "2.0"), release(files, "2.1")
    engine.offer(first)
    assert engine("runtime", "install", "engine").code == 0
    engine.offer(second, first)
    hold = engine.hold(stage) if stage in ("finish", "check") else None
    if stage == "fetch":
        files.acts["/engine-2.1-cpu.tar.gz"] = files.stall
    process = subprocess.Popen(
        engine.command("runtime", "install", "engine", "--json"),
        env=engine.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for reached in stages(process):
        if reached == stage:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    if hold is not None:
        hold.unlink()
    states = {row["install"]: row["state"] for row in engine.rows()}
    assert states.pop("2.0-cpu") == "ready"
    assert states in ({}, {"2.1-cpu": "ready"})
    files.acts.clear()
    assert engine("runtime", "install", "engine").code == 0
    assert {r["install"]: r["state"] for r in engine.rows()} == {
        "2.0-cpu": "ready", "2.1-cpu": "ready",
    }  # fmt: skip
    assert not (engine.runtimes / ".staging").exists()


def test_two_installers_at_once_install_once(engine: Engine, files: FileServer) -> None:
    engine.offer(release(files, "2.0"))
    hold = engine.hold("finish")
    command = engine.command("runtime", "install", "engine", "--json")
    pair = [
        subprocess.Popen(command, env=engine.environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    first_lines = []
    for process in pair:
        assert process.stdout is not None
        first_lines.append(json.loads(process.stdout.readline()))
    waits = [line["event"] == "note" and "waiting" in line["message"] for line in first_lines]
    assert sorted(waits) == [False, True]
    hold.unlink()
    outs = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    last = [json.loads(out.splitlines()[-1]) for out in outs]
    assert sorted(line["fresh"] for line in last) == [False, True]
    assert len(files.asked) == 1


def test_a_full_disk_is_named_and_nothing_is_left(
    engine: Engine, files: FileServer, tmp_path: Path
) -> None:
    plan = release(files, "2.0")
    disk = tmp_path / "small"
    with small_disk(disk, "2m") as mounted:
        if mounted:
            given = tmp_path / "given"
            library(given / "lib" / "libengine.so")
            (given / "weights").write_bytes(os.urandom(4 << 20))
            engine.home = disk / "home"
            ended = engine("runtime", "install", "engine", "--from", str(given), "--json")
            assert ended.code == 4
            assert json.loads(ended.out.splitlines()[-1])["code"] == "no_room"
            assert not list(disk.glob("home/data/runtimes/engine/*"))
        (archive,) = plan.artifacts
        huge = {"version": "2.0", "artifacts": [{"type": "archive", "url": files.url,
                "size": 1 << 60, "sha256": "0" * 64}]}  # fmt: skip
        (engine.folder / "engine-recipe.json").write_text(json.dumps([{"plan": huge}]))
        ended = engine("runtime", "install", "engine", "--json")
        assert ended.code == 4, archive
        assert json.loads(ended.out.splitlines()[-1])["code"] == "no_room"
    assert files.asked == []


def test_a_home_that_cannot_be_written_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine.home = tmp_path / "file" / "home"
    given = folder_with(tmp_path)
    ended = engine("runtime", "install", "engine", "--from", str(given))
    assert ended.code == 2
    assert "cannot be written" in ended.err
    assert "SUPERFLUID_HOME" in ended.err
    assert engine("compat").code == 0
    assert engine("runtime", "versions", "engine").code == 0
    found = {row["id"]: row["state"] for row in engine.json("runtimes")["runtimes"]}
    assert (found["fake"], found["engine"]) == ("ready", "not-installed")


# An environment of its own


def packed(name: str, version: str, members: dict[str, bytes], index: Path) -> Wheel:
    """A wheel of these members in a simple index."""
    info = f"{name}-{version}.dist-info"
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in members).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in members.items():
            archive.writestr(path, data)
    folder = index / name
    folder.mkdir(parents=True)
    (folder / f"{name}-{version}-py3-none-any.whl").write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Wheel(name=name, version=version, size=len(buffer.getvalue()), sha256=digest)


def msgspec_members() -> dict[str, bytes]:
    """The msgspec of this environment, which the kit needs in every other."""
    root = Path(msgspec.__file__).parent
    return {
        f"msgspec/{path.relative_to(root)}": path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def kit_wheels(index: Path) -> tuple[Wheel, ...]:
    """What the kit wants of an environment; only msgspec is needed for a check."""
    stubs = [packed(name, "9.9", {f"{name}/__init__.py": b""}, index) for name in STUBS]
    return (packed("msgspec", "9.9", msgspec_members(), index), *stubs)


STUBS = ("jinja2", "numpy")


def test_a_private_environment_runs_the_check_and_sees_our_packages_alone(
    engine: Engine, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    kit = kit_wheels(index)
    lib = library(tmp_path / "libengine.so").read_bytes()
    held = packed("enginelib", "2.0", {"lib/libengine.so": lib}, index)
    plan = InstallPlan(version="2.0", backend="cpu", artifacts=(held,), environment=kit)
    engine.offer(plan)
    with serving_index(index) as (url, asked):
        network = {"PIP_INDEX_URL": url, "PIP_TARGET": str(tmp_path / "elsewhere")}
        engine.extra |= {**network, "PIP_TRUSTED_HOST": "127.0.0.1", "PYTHONPATH": str(tmp_path)}
        ended = engine("runtime", "install", "engine")
        assert ended.code == 0, ended.err
        assert any("enginelib" in path for path in asked)
    (row,) = engine.rows()
    assert (row["state"], row["devices"]) == ("ready", ["own python, 1 cylinders"])
    assert not (tmp_path / "elsewhere").exists()
    model = str(write_model(tmp_path / "m.fake"))
    assert "install  2.0-cpu" in engine("serve", model, "--plan", "--runtime", "engine").out
    planned = engine.json("serve", model, "--plan", "--runtime", "engine", "--lanes", "2")
    golden(planned, "plan")
    assert (planned["runtime"], planned["install"]) == ("engine", "2.0-cpu")
    assert (planned["path"], planned["state"]) == (model, "ready")
    assert planned["options"]["lanes"] == {"value": 2, "origin": "flag"}
    assert planned["options"]["engine-gear"]["origin"] == "default"
    wrong = plan.environment[0]
    engine.offer(InstallPlan(version="2.1", environment=(
        Wheel(name="msgspec", version="9.9", size=wrong.size, sha256="0" * 64),)))  # fmt: skip
    with serving_index(index) as (url, _):
        ended = engine("runtime", "install", "engine", "--json", PIP_INDEX_URL=url)
    assert json.loads(ended.out.splitlines()[-1])["code"] == "artifact_mismatch"


def test_an_environment_killed_while_it_is_made_leaves_what_stood(
    engine: Engine, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    lib = library(tmp_path / "libengine.so", version="2.1").read_bytes()
    kit = kit_wheels(index)
    held = packed("enginelib", "2.1", {"lib/libengine.so": lib}, index)
    engine.offer(InstallPlan(version="2.1", backend="cpu", artifacts=(held,), environment=kit))
    given = folder_with(tmp_path)
    assert engine("runtime", "install", "engine", "--from", str(given)).code == 0
    with serving_index(index) as (url, _):
        engine.extra |= {"PIP_INDEX_URL": url, "PIP_TRUSTED_HOST": "127.0.0.1"}
        process = subprocess.Popen(
            engine.command("runtime", "install", "engine", "--json"),
            env=engine.environment(), stdout=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        assert "environment" in stages(process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        assert [(r["install"], r["state"]) for r in engine.rows()] == [("2.0-local", "ready")]
        assert engine("runtime", "install", "engine").code == 0
    assert [(r["install"], r["state"]) for r in engine.rows()] == [
        ("2.1-cpu", "ready"), ("2.0-local", "ready"),
    ]  # fmt: skip


def test_a_repair_without_a_source_leaves_the_install_and_says_so(
    engine: Engine, tmp_path: Path
) -> None:
    given = folder_with(tmp_path)
    assert engine("runtime", "install", "engine", "--from", str(given)).code == 0
    (engine.runtimes / "2.0-local" / "environment.json").unlink()
    assert "made again" in engine("runtime", "repair", "engine").out
    shutil.rmtree(given)
    (engine.runtimes / "2.0-local" / "environment.json").unlink()
    ended = engine("runtime", "repair", "engine")
    assert ended.code == 4
    assert "no such file" in ended.err
    assert (engine.runtimes / "2.0-local" / "lib" / "libengine.so").exists()


# Serving


def test_an_installed_engine_serves_before_what_ships_and_is_held_meanwhile(
    engine: Engine, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m.fake")
    assert "runtime  fake" in engine("serve", str(model), "--plan").out
    given = folder_with(tmp_path)
    assert engine("runtime", "install", "engine", "--from", str(given)).code == 0
    plan = engine("serve", str(model), "--plan", "--engine-gear", "5").out
    assert "runtime  engine 2.0" in plan
    assert "option   engine-gear = 5  (flag)" in plan
    serves = engine.json("runtimes", str(model))
    golden(serves, "serves")
    assert (serves["runtime"], serves["install"]) == ("engine", "2.0-local")
    with serving([str(model)], engine.home, str(engine.python)) as server:
        assert httpx.get(server.url + "/health").json()["status"] == "ok"
        ended = engine("runtime", "remove", "engine", "2.0-local")
        assert ended.code == 1
        assert "in use by a server" in ended.err
    assert engine("runtime", "remove", "engine", "2.0-local").code == 0


def test_a_choice_that_is_wrong(engine: Engine, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m.fake"))
    for arguments, code, words in [
        (["--runtime", "engine@9"], 2, "no install 9"),
        (["--runtime", "engine"], 4, "run superfluid runtime install engine"),
        (["--runtime", "native"], 2, "give --runtime engine or fake"),
        (["--engine-gear", "3"], 2, "--engine-gear is an option of runtime engine"),
        (["--runtime", "other=native", "--fake-mode", "odd"], 0, ""),
        (["--runtime", "fake,m=native"], 2, "native does not read"),
    ]:
        ended = engine("serve", model, "--plan", *arguments)
        assert ended.code == code, (arguments, ended.err)
        assert words in ended.err
    unread = tmp_path / "x.bin"
    unread.write_bytes(b"????????")
    ended = engine("runtimes", str(unread), "--json")
    assert ended.code == 1
    golden(json.loads(ended.out), "serves")
    assert json.loads(ended.out)["exit_code"] == 3


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SUPERFLUID_LANES": "0"}, "; set SUPERFLUID_LANES to an integer from 1 to 256"),
        ({"SUPERFLUID_NATIVE_KV_TYPE": "q"}, "; set SUPERFLUID_NATIVE_KV_TYPE to one of f32, "),
        ({"SUPERFLUID_NATIVE_EXAT": "1"}, "(environment); did you mean SUPERFLUID_NATIVE_EXACT?"),
        ({"SUPERFLUID_RUNTIME": "fak"}, "did you mean fake?; it was given by SUPERFLUID_RUNTIME"),
        ({"SUPERFLUID_CONTEXT": "7000"}, "; it was given by SUPERFLUID_CONTEXT"),
        ({"SUPERFLUID_NATIVE_LAYERS": "9"}, "; it was given by SUPERFLUID_NATIVE_LAYERS"),
        ({"SUPERFLUID_NAME": "a/b"}, "; it was given by SUPERFLUID_NAME"),
    ],
)
def test_what_the_environment_gives_wrong_is_mended_there(
    engine: Engine, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    model = str(tiny_models.write_model(tmp_path / "m.gguf", tiny_models.TinyModel()))
    ended = engine("serve", model, "--plan", **variables)
    assert ended.code in (2, 3)
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_a_flag_that_no_runtime_has_is_unknown_whoever_serves(
    engine: Engine, tmp_path: Path
) -> None:
    model = str(write_model(tmp_path / "m.fake"))
    for flag, words in (
        ("--engine-nope", "unknown option --engine-nope (flag); see superfluid runtime options en"),
        ("--engine-gea", "unknown option --engine-gea (flag); did you mean --engine-gear?"),
        ("--fake-mod", "unknown option --fake-mod (flag); did you mean --fake-mode?"),
    ):
        ended = engine("serve", model, "--plan", flag, "1")
        assert (ended.code, words in ended.err) == (2, True), ended.err


def test_an_adapter_that_hangs_holds_nobody_up(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "LEAST_S", 3.0)
    monkeypatch.setattr(catalog, "ANSWER_S", 150.0)
    script, pid = tmp_path / "worker", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    script.chmod(0o755)
    rows = engine.json("runtimes", SUPERFLUID_WORKER_HUNG=str(script))["runtimes"]
    found = {row["id"]: row for row in rows}
    assert found["hung"]["state"] == "broken"
    assert re.search(r"did not answer in \d+ s .* as others did", found["hung"]["problem"])
    assert "SUPERFLUID_WORKER_HUNG" in found["hung"]["fix"]
    assert found["fake"]["state"] == "ready"
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_worker_named_by_the_environment_answers_before_the_shipped_one(
    engine: Engine, tmp_path: Path
) -> None:
    script = tmp_path / "worker"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        f'exec {sys.executable} -P -m superfluid_workerd "$@"\n'
    )
    script.chmod(0o755)
    engine.json("compat", SUPERFLUID_WORKER_NATIVE=str(script))
    engine.json("runtimes", SUPERFLUID_WORKER_NATIVE=str(script))
    asked = (tmp_path / "asked").read_text()
    assert " native about" in asked
    assert " native check" in asked
    found = engine.json("compat", SUPERFLUID_WORKER_NATIVE="/no/such/worker")["runtimes"]
    assert "/no/such/worker could not be started" in found["native"]["problem"]
    assert found["fake"]["problem"] is None


def test_a_link_to_the_command_still_finds_its_workers(tmp_path: Path) -> None:
    link = tmp_path / "bin" / "superfluid"
    link.parent.mkdir()
    link.symlink_to(Path(sys.executable).with_name("superfluid"))
    done = subprocess.run(
        [str(link), "compat", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"SUPERFLUID_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert json.loads(done.stdout)["runtimes"]["native"]["problem"] is None


# Completion


def completions(engine: Engine, words: str) -> list[str]:
    shell = {"_SUPERFLUID_COMPLETE": "complete_bash", "COMP_WORDS": words}
    shell["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        engine.command(), env=engine.environment(**shell), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout.split()


def test_the_shell_completes_options_and_installs(engine: Engine, tmp_path: Path) -> None:
    assert engine("runtime", "install", "engine", "--from", str(folder_with(tmp_path))).code == 0
    assert completions(engine, "superfluid serve --engine-") == ["--engine-lib", "--engine-gear"]
    assert completions(engine, "superfluid serve --contex") == ["--context"]
    assert completions(engine, "superfluid runtime use eng") == ["engine"]
    assert completions(engine, "superfluid runtime use engine ") == ["2.0-local"]
    assert completions(engine, "superfluid serve --runtime engine@") == ["engine@2.0-local"]
    assert completions(engine, "superfluid serve --sandbox s") == ["strict"]
    assert completions(engine, "superfluid serve --qos b") == ["background"]
    for before in ("", "m.fake "):
        assert completions(engine, f"superfluid serve {before}--fake-mode o") == ["odd"]
    assert completions(engine, "superfluid serve m.fake --native-kv-type f") == ["f32", "f16"]
    assert completions(engine, "superfluid serve --native-exact ") == ["true", "false"]


def test_the_shell_completes_versions_and_backends(engine: Engine) -> None:
    offers = [("2.1", "cpu"), ("2.0", "gpu"), ("2.0", "cpu")]
    engine.offer(*(InstallPlan(version=version, backend=name) for version, name in offers))
    start = "superfluid runtime install engine"
    assert completions(engine, f"{start} --version ") == ["2.1", "2.0"]
    assert completions(engine, f"{start} --backend ") == ["cpu", "gpu"]
    assert completions(engine, f"{start} --version 2.0 --backend g") == ["gpu"]
    assert completions(engine, f"{start} --version 2.1 --backend g") == []


def test_versions_are_told_newest_first_whatever_their_backend(engine: Engine) -> None:
    offers = [("b900", "cpu"), ("b1000", "cpu"), ("b1000", "gpu"), ("b1100", "gpu")]
    engine.offer(*(InstallPlan(version=version, backend=name) for version, name in offers))
    told = engine.json("runtime", "versions", "engine")["versions"]
    assert [(row["version"], row["backend"]) for row in told] == [
        ("b1100", "gpu"), ("b1000", "cpu"), ("b1000", "gpu"), ("b900", "cpu"),
    ]  # fmt: skip


def test_what_cannot_be_installed_so_is_told_as_it_is(engine: Engine, tmp_path: Path) -> None:
    offers = [("2.1", "cpu"), ("2.0", "gpu"), ("2.0", "cpu")]
    engine.offer(*(InstallPlan(version=version, backend=name) for version, name in offers))
    empty = tmp_path / "empty"
    empty.mkdir()
    wheel = Wheel(name="enginelib", version="2.2", size=1, sha256="0" * 64)
    for arguments, words in [
        (["--backend", "metal"], "has no backend metal to install here, wanted one of cpu, gpu;"),
        (["--backend", "gpuu"], "did you mean gpu?"),
        (["--version", "9"], "has no version 9 to install here, wanted one of 2.1, 2.0;"),
        (["--version", "2.1", "--backend", "gpu"], "no backend gpu to install here, wanted one of"),
        (["--from", str(empty), "--backend", "nonsense"], "leave it out, it is local then"),
        (["--from", str(empty), "--backend", "a/b"], "--backend 'a/b' cannot name an install"),
        (["--from", str(empty)], str(empty)),
    ]:
        ended = engine("runtime", "install", "engine", *arguments)
        assert ended.code in (2, 4)
        told = ended.err.splitlines()[-1]
        assert words in told, told
        assert ".staging" not in told
    engine.offer(InstallPlan(version="2.2", environment=(wheel,)))
    for more in ([], ["--dry-run"]):
        ended = engine("runtime", "install", "engine", "--from", str(empty), *more)
        assert ended.code == 2
        assert f"an environment of its own, which cannot be made from {empty};" in ended.err
        assert "leave --from out; an environment of your own serves with --engine-" in ended.err


# Configuration


def test_every_value_shows_where_it_comes_from(engine: Engine, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.fake")
    file = engine.home / "config" / "superfluid.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"""
        [server]
        port = 9999
        [options]
        lanes = 3
        context = 100
        [runtimes.fake]
        mode = "odd"
        [models.small]
        model = "{model}"
        runtime = "fake"
        options = {{ context = 50 }}
        [models.small.runtimes.fake]
        cache-bytes = "2M"
        """
    )
    shown = engine.json("config", "show", "small", SUPERFLUID_LANES="5", SUPERFLUID_PORT="")
    expected: dict[str, tuple[Any, str]] = {
        "lanes": (5, "environment"),
        "port": (9999, f"config {file}"),
        "context": (50, f"config {file} [models.small]"),
        "runtime": ("fake", f"config {file} [models.small]"),
        "fake-mode": ("odd", f"config {file} [runtimes.fake]"),
        "fake-cache-bytes": (2 << 20, f"config {file} [models.small.runtimes.fake]"),
        "threads": (0, "default"),
    }
    for name, (value, origin) in expected.items():
        assert shown[name] == {"value": value, "origin": origin}
    assert engine.json("config", "show")["context"]["value"] == 100
    plan = engine("serve", "small", "--plan", "--context", "60")
    assert plan.code == 0, plan.err
    assert "model    small" in plan.out
    assert "option   context = 60  (flag)" in plan.out
    assert "option   fake-cache-bytes = 2097152" in plan.out
    other = tmp_path / "other.toml"
    shutil.copy(file, other)
    assert "[models.small]" in engine("config", "show", "small", "--config", str(other)).out


def test_a_value_that_only_the_model_refuses_is_traced_to_its_file(
    engine: Engine, tmp_path: Path
) -> None:
    model = tiny_models.write_model(tmp_path / "m.gguf", tiny_models.TinyModel())
    file = tmp_path / "superfluid.toml"
    for text, place in [
        ("[options]\ncontext = 7000", f"context in {file}"),
        ("[runtimes.native]\nlayers = [9]", f"native-layers in {file} [runtimes.native]"),
    ]:
        file.write_text(text)
        ended = engine("serve", str(model), "--plan", "--config", str(file))
        assert ended.code in (2, 3)
        assert ended.err.endswith(f"; it was given by {place}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[options]\ncontxt = 1", "did you mean context?"),
        ("[options]\nlanes = 0", "option lanes was given 0"),
        ("[options]\nport = 1", "port stands in options, wanted in [server]"),
        ("[optins]\nlanes = 1", "optins is no name of this file, did you mean options?"),
        ("[models.m]\nruntime = 'x'", "models.m.model: field required"),
        ("[runtimes.natve]\nexact = true", "did you mean native?"),
        ("[runtimes.fake]\nmode = 'loud'", "option fake-mode was given 'loud'"),
        ("[runtimes.fake]\nmode = 'loud'", "superfluid.toml [runtimes.fake] to one of"),
        ("[runtimes.fake]\nmood = 'odd'", "did you mean mode?"),
        ("[options]\nlanes = 0", "set lanes in "),
        ("lanes = [", "is no TOML"),
        ("[server]\nconfig = 'x'", "names no other"),
    ],
)
def test_a_configuration_that_is_wrong(
    engine: Engine, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "superfluid.toml"
    file.write_text(text)
    model = str(write_model(tmp_path / "m.fake"))
    ended = engine("serve", model, "--plan", "--config", str(file))
    assert ended.code == 2
    assert words in ended.err
    assert ended.err.count("\n") == 1

"""Which adapters exist, what workers answer, and which of them is picked."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import psutil
import pytest

from superfluid.catalog import entries, formats
from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.entries import Entry
from superfluid.catalog.environment import ALLOWED, worker_environment
from superfluid.catalog.workerd import ANSWER_BYTES, Workerd, shipped
from superfluid.models.resolve import located_path
from superfluid_compat.entrypoints import ADAPTERS
from superfluid_compat.errors import (
    ContractRefused,
    ModelDamaged,
    ModelError,
    ModelNotFound,
    RuntimeBroken,
    SuperfluidError,
    UnknownAdapter,
    WrongRuntime,
)
from superfluid_workerd.link.answers import GGUF, SAFETENSORS, About, AdapterInfo, Format

ANSWERS = {
    "good": '{"id": "good", "kit": 1, "summary": "s", "aliases": ["fine"], '
    '"formats": [{"name": "gguf", "magic": "47475546"}]}',
    "folders": '{"id": "folders", "kit": 1, "summary": "s", '
    '"formats": [{"name": "safetensors", "holds": ["config.json", "*.safetensors"]}]}',
    "songs": '{"id": "songs", "kit": 1, "summary": "s", '
    '"formats": [{"name": "song", "holds": ["*.song"]}]}',
    "newer": '{"id": "newer", "summary": "s", "formats": [], "kit": 99}',
    "garbled": '{"id": 7',
    "other": '["not", "an", "info"]',
}


def workerd(folder: Path, body: str) -> Workerd:
    """A worker whose command is `body`, with `ID` and `WORDS` at hand."""
    script = folder / "worker.py"
    head = "import sys, os, time, json\nID, WORDS = sys.argv[3], sys.argv[4:]\n"
    script.write_text(head + textwrap.dedent(body))
    return Workerd((sys.executable, "-S", str(script)))


def entry(name: str) -> Entry:
    return Entry(name, f"dist-{name}", "1", f"package_{name}")


def catalog(folder: Path, *names: str) -> Catalog:
    body = f"""
        answers = {ANSWERS!r}
        if ID == "dead":
            print("it was never alive", file=sys.stderr)
            os.kill(os.getpid(), 9)
        if ID == "refusing":
            print(json.dumps(dict(code="model_damaged", message="bad", fix="mend it")))
            sys.exit(3)
        print('{{"info": ' + answers[ID] + '}}')
    """
    return Catalog(workerd(folder, body), [entry(name) for name in names])


def point(folder: Path, distribution: str, name: str) -> EntryPoint:
    """An entry point whose package does not exist: nothing here may import it."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ADAPTERS}]\n{name} = nowhere_{name}.x:make\n")
    (found,) = PathDistribution(info).entry_points
    return found


def test_adapters_are_found_by_name_and_distribution_alone(tmp_path: Path) -> None:
    found = entries.find([point(tmp_path, "one", "b"), point(tmp_path, "two", "a")])
    assert found == (
        Entry("a", "two", "1.0", "nowhere_a"),
        Entry("b", "one", "1.0", "nowhere_b"),
    )


async def test_two_claims_on_one_id_name_both_and_spare_the_rest(tmp_path: Path) -> None:
    points = [
        point(tmp_path, "two", "same"),
        point(tmp_path, "one", "same"),
        point(tmp_path, "three", "good"),
    ]
    found = Catalog(catalog(tmp_path).workerd, entries.find(points))
    good, same = await found.rows()
    assert good.info is not None
    assert same.problem is not None
    assert "one and two both provide a runtime called same" in same.problem.message


@pytest.mark.parametrize("name", ["../up", "Up", "", "a_b", "-a"])
def test_an_id_that_is_no_word_is_refused(name: str) -> None:
    (found,) = entries.find([EntryPoint(name, "nowhere.x:make", ADAPTERS)])
    assert found.problem is not None
    assert f"calls its runtime {name!r}" in found.problem.message


def test_the_native_adapter_is_registered_like_a_stranger() -> None:
    (native,) = (each for each in entries.find() if each.id == "native")
    assert (native.distribution, native.package) == ("superfluid", "superfluid_adapter_native")


async def test_a_broken_adapter_is_a_row_with_its_reason(tmp_path: Path) -> None:
    names = ["good", "dead", "garbled", "newer", "other", "refusing"]
    rows = {row.id: row for row in await catalog(tmp_path, *names).rows()}
    assert [name for name, row in rows.items() if row.info] == ["good"]
    problems = {name: row.problem for name, row in rows.items() if row.problem}
    assert "it was never alive" in problems["dead"].message
    assert isinstance(problems["newer"], ContractRefused)
    assert "adapter kit 99" in problems["newer"].message
    assert isinstance(problems["refusing"], ModelDamaged)
    assert problems["refusing"].fix == "mend it"
    for name in ("garbled", "other"):
        assert isinstance(problems[name], RuntimeBroken)
        assert "answered something else" in problems[name].message


async def test_adapters_are_asked_side_by_side(tmp_path: Path) -> None:
    """Each answers only once all have been asked."""
    body = f"""
        open(os.path.join({str(tmp_path)!r}, ID + ".asked"), "w").close()
        while sum(n.endswith(".asked") for n in os.listdir({str(tmp_path)!r})) < 3:
            time.sleep(0.01)
        print('{{"info": {{"id": "x", "kit": 1, "summary": "s", "formats": []}}}}')
    """
    rows = await Catalog(workerd(tmp_path, body), [entry(name) for name in "abc"]).rows()
    assert [row.problem for row in rows] == [None] * 3


async def test_an_answer_in_time_or_a_dead_worker(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"""
        print("still thinking", file=sys.stderr, flush=True)
        open({str(pid)!r}, "w").write(str(os.getpid()))
        time.sleep(3600)
    """
    with pytest.raises(RuntimeBroken, match=r"took longer than 8 s.*still thinking") as caught:
        await workerd(tmp_path, body).ask("a", ["info"], dict, timeout_s=8)
    assert "asked for info" in caught.value.message
    assert not psutil.pid_exists(int(pid.read_text()))


async def test_a_flood_of_either_kind_is_bounded(tmp_path: Path) -> None:
    body = """
        for _ in range(400):
            sys.stderr.write("x" * 65536)
        sys.stdout.write(" " * (64 << 20) + "{}")
    """
    with pytest.raises(RuntimeBroken, match="answered something else"):
        await workerd(tmp_path, body).ask("a", ["info"], dict, timeout_s=60)
    assert ANSWER_BYTES < 64 << 20


async def test_what_is_given_stands_on_stdin(tmp_path: Path) -> None:
    told = workerd(tmp_path, "print(json.dumps([WORDS, sys.stdin.read()]))")
    answer = await told.ask("a", ["prepare", "--x"], list[object], given=b"facts", timeout_s=30)
    assert answer == [["prepare", "--x"], "facts"]


async def test_a_worker_that_reads_no_stdin_is_no_error(tmp_path: Path) -> None:
    told = workerd(tmp_path, "os.close(0); print('{}')")
    assert await told.ask("a", ["x"], dict, given=b"y" * (1 << 20), timeout_s=30) == {}


async def test_a_worker_that_does_not_exist_is_a_broken_runtime(tmp_path: Path) -> None:
    with pytest.raises(RuntimeBroken, match="could not be started"):
        await Workerd((str(tmp_path / "none"),)).ask("a", ["info"], dict, timeout_s=5)


async def test_workers_get_the_allowed_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HOME", "PYTHONPATH", "NUMBA_CACHE_DIR", "HTTPS_PROXY", "LD_PRELOAD"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("SUPERFLUID_MAX_SEATS", "3")
    monkeypatch.setenv("SUPERFLUID_TOKEN", "secret")
    told = workerd(tmp_path, "print(json.dumps(dict(os.environ)))")
    seen = await told.ask("a", ["x"], dict[str, str], timeout_s=30)
    assert "secret" not in seen.values()
    assert (seen["OMP_NUM_THREADS"], seen["SUPERFLUID_MAX_SEATS"]) == ("2", "3")
    assert seen["PATH"] == os.environ["PATH"]


def test_temporary_files_of_a_worker_go_to_its_scratch() -> None:
    given = {"TMPDIR": "/elsewhere", "LC_ALL": "C", "LCD": "no"}
    assert worker_environment(Path("/scratch"), given) == {"LC_ALL": "C", "TMPDIR": "/scratch"}
    assert all(reason for reason in ALLOWED.values())


def test_a_format_is_known_by_its_first_bytes_or_its_names(tmp_path: Path) -> None:
    file, folder = tmp_path / "m", tmp_path / "f"
    file.write_bytes(b"GGUF\x03\0\0\0")
    folder.mkdir()
    (folder / "config.json").touch()
    assert formats.holds(file, GGUF)
    assert not formats.holds(file, SAFETENSORS)
    assert not formats.holds(folder, SAFETENSORS)
    (folder / "model.safetensors").touch()
    assert formats.holds(folder, SAFETENSORS)
    assert not formats.holds(folder, GGUF)
    assert not formats.holds(file, Format(name="empty"))
    assert not formats.holds(folder, Format(name="empty"))
    with pytest.raises(ModelNotFound, match="no model at"):
        formats.holds(tmp_path / "none", GGUF)


async def test_the_format_picks_the_runtime(tmp_path: Path) -> None:
    model = tmp_path / "m.bin"
    model.write_bytes(b"GGUF1234")
    found = catalog(tmp_path, "dead", "folders", "good")
    for runtime in (None, "good", "fine"):
        assert [row.id for row in await found.candidates(model, runtime)] == ["good"]


@pytest.mark.parametrize(
    ("names", "runtime", "head", "kind", "words"),
    [
        (["good"], "goof", b"GGUF", UnknownAdapter, "no runtime is called goof; here are good"),
        (["good"], None, b"PK\3\4", ModelError, "begins with 50 4b 03 04.*good reads gguf"),
        (["good"], None, b"", ModelError, "an empty file"),
        (["good", "folders"], "folders", b"GGUF", WrongRuntime, "it reads safetensors"),
        (["good", "folders"], "folders", b"PK", ModelError, "folders reads safetensors"),
        (
            ["dead", "good"],
            None,
            b"PK",
            RuntimeBroken,
            "good reads gguf.*others do not answer: dead: .*it was never alive",
        ),
        (["dead", "good", "other"], None, b"PK", RuntimeBroken, "dead: .*; other: .*answered"),
        (["dead"], None, b"GGUF", RuntimeBroken, "it was never alive"),
        (["good", "dead"], "dead", b"GGUF", RuntimeBroken, "it was never alive"),
        ([], None, b"GGUF", RuntimeBroken, "no runtime is here at all"),
    ],
)
async def test_a_choice_that_cannot_serve_says_what_was_found(
    tmp_path: Path,
    names: list[str],
    runtime: str | None,
    head: bytes,
    kind: type[SuperfluidError],
    words: str,
) -> None:
    model = tmp_path / "m.bin"
    model.write_bytes(head)
    with pytest.raises(kind, match=words):
        await catalog(tmp_path, *names).candidates(model, runtime)


async def test_a_broken_runtime_that_might_have_read_it_is_named_with_its_remedy(
    tmp_path: Path,
) -> None:
    model = tmp_path / "m.bin"
    model.write_bytes(b"PK")
    claimed = [point(tmp_path, "one", "twice"), point(tmp_path, "two", "twice")]
    asked = catalog(tmp_path, "good")
    asked.entries = (*asked.entries, *entries.find(claimed))
    with pytest.raises(RuntimeBroken, match="one and two both provide a runtime called") as caught:
        await asked.candidates(model)
    assert caught.value.exit_code == 4
    assert caught.value.fix == "uninstall one of them"


async def test_a_folder_of_a_strangers_format_goes_to_whoever_declares_it(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "weights.song").touch()
    found = catalog(tmp_path, "good", "songs")
    assert [row.id for row in await found.candidates(located_path(model).path)] == ["songs"]
    (model / "weights.song").rename(model / "weights.tune")
    with pytest.raises(ModelError, match=r"a folder with weights\.tune, which no") as caught:
        await found.candidates(model)
    assert caught.value.fix == "name a file in it, or give a model in one of these formats"


def test_the_remedy_names_who_provides_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Entry("a", "their-package", "1", "a").remedy == "reinstall their-package"
    assert entries.remedy("native") == "reinstall superfluid"
    assert entries.remedy("unknown") == "reinstall superfluid"
    assert entries.remedy("fake") == "reinstall superfluid-adapter-fake"
    monkeypatch.setenv("SUPERFLUID_WORKER_FAKE", "/x/worker")
    assert entries.remedy("fake") == "check the command in SUPERFLUID_WORKER_FAKE"


async def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="an empty folder"):
        await catalog(tmp_path, "good", "folders").candidates(tmp_path / "empty")


async def test_the_shipped_worker_does_not_look_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "superfluid_workerd.py").write_text("raise SystemExit(77)")
    (tmp_path / "argparse.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownAdapter):
        await shipped().ask("no-such-adapter", ["info"], dict, timeout_s=30)


async def test_an_asker_that_goes_away_leaves_no_worker(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    asking = asyncio.create_task(workerd(tmp_path, body).ask("a", ["x"], dict, timeout_s=60))
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_row_knows_its_names(tmp_path: Path) -> None:
    info = AdapterInfo(id="a", kit=1, summary="", formats=(), aliases=("c",))
    row = Row(entry("a"), About(info=info))
    assert row.named("a")
    assert row.named("c")
    assert not row.named("b")

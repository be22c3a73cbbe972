"""Hub models through the real `huggingface_hub` and a hub-shaped server on loopback."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid.models.hub import HubFile, HubId, HubModel, choose
from superfluid.models.pull import Reports, pull
from superfluid.models.store import Store, folder_name
from superfluid.paths import Paths
from superfluid_compat.errors import (
    DigestMismatch,
    FetchFailed,
    ModelNotFound,
    Offline,
    SuperfluidError,
)
from support.hub_server import COMMIT, Hub, serving_hub

# `huggingface_hub` hands over bodies in blocks of 10 MiB.
BIG = random.Random(0).randbytes(24_000_000)
FILES = {
    "org/model": {
        "README.md": b"words",
        "model-Q4_K_M.gguf": BIG,
        "model-Q8_0.gguf": b"eight",
        "mmproj-model-F16.gguf": b"eyes",
        "parts/model-F16-00001-of-00002.gguf": b"one",
        "parts/model-F16-00002-of-00002.gguf": b"two",
    },
    "org/folder": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickled",
    },
    "org/empty": {"README.md": b"words"},
    "org/hostile": {"a/..gguf/\x07.gguf": b"x"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub({name: dict(files) for name, files in FILES.items()}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Paths.under(tmp_path))


Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start_pull(tmp_path: Path, hub: Hub) -> Iterator[Start]:
    """Starts pulls of org/model in processes of their own, into the test's store."""
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "superfluid", "models", "pull", "org/model"],
                env={**os.environ, "SUPERFLUID_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def source(text: str) -> HubModel:
    hub_id = HubId.parse(text)
    assert hub_id is not None
    return HubModel(hub_id)


def bodies(store: Store, text: str) -> list[tuple[str, bytes]]:
    stored = pull(store, source(text))
    return [(file.name, (stored.folder / file.name).read_bytes()) for file in stored.manifest.files]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("org/model", [("model-Q4_K_M.gguf", BIG)]),
        ("org/model:q8_0", [("model-Q8_0.gguf", b"eight")]),
        ("org/model:model-Q8_0.gguf", [("model-Q8_0.gguf", b"eight")]),
        (
            "org/model:F16",
            [("model-F16-00001-of-00002.gguf", b"one"), ("model-F16-00002-of-00002.gguf", b"two")],
        ),
    ],
)
def test_an_id_picks_its_files(store: Store, text: str, files: list[tuple[str, bytes]]) -> None:
    assert bodies(store, text) == files
    stored = store.get(text)
    assert stored.path.name == files[0][0]
    assert stored.manifest.source == f"hub:org/model@{COMMIT}"
    assert stored.manifest.licence == "apache-2.0"


@pytest.mark.usefixtures("hub")
def test_a_safetensors_folder_comes_whole_and_without_pickles(store: Store) -> None:
    names = [name for name, _ in bodies(store, "org/folder")]
    assert sorted(names) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert store.get("org/folder").path.is_dir()


def test_bodies_that_come_by_way_of_a_redirect(store: Store, hub: Hub) -> None:
    hub.state.redirect = True
    assert bodies(store, "org/model:Q8_0") == [("model-Q8_0.gguf", b"eight")]


def test_a_connection_cut_short_is_taken_up_by_range(store: Store, hub: Hub) -> None:
    hub.state.cut_after = 12_000_000
    assert bodies(store, "org/model") == [("model-Q4_K_M.gguf", BIG)]
    assert hub.state.ranges[0] == 0
    assert 0 < hub.state.ranges[1] <= 12_000_000


@pytest.mark.parametrize("ignore_range", [False, True])
def test_a_pull_that_was_killed_is_taken_up_by_range(
    store: Store, hub: Hub, start_pull: Start, *, ignore_range: bool
) -> None:
    hub.state.stall_after = 12_000_000
    process = start_pull()
    assert hub.state.stalled.wait(60)
    partial = wait_for_bytes(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.state.stall_after, hub.state.ignore_range = None, ignore_range
    hub.state.resume.set()
    seen: list[int] = []
    stored = pull(store, source("org/model"), Reports(progress=lambda done, _: seen.append(done)))
    assert stored.path.read_bytes() == BIG
    assert ignore_range or hub.state.ranges[-1] >= partial > 0


def test_an_interrupt_is_one_line(hub: Hub, start_pull: Start) -> None:
    hub.state.stall_after = 12_000_000
    process = start_pull()
    wait_for_bytes(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "superfluid: interrupted"
    assert "Traceback" not in err


def test_two_processes_fetch_once(store: Store, hub: Hub, start_pull: Start) -> None:
    hub.state.stall_after = 12_000_000
    first = start_pull()
    assert hub.state.stalled.wait(60)
    second = start_pull()
    assert second.stderr is not None
    assert "another process is fetching it" in second.stderr.readline()
    hub.state.resume.set()
    outputs = [process.communicate(timeout=60)[0].splitlines()[-1] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert outputs[0] == outputs[1] == str(store.get("org/model").path)
    assert hub.state.ranges == [0]


def test_other_bytes_than_announced_are_refused(store: Store, hub: Hub) -> None:
    hub.state.corrupt = True
    with pytest.raises(DigestMismatch, match=r"model-Q8_0\.gguf has SHA-256"):
        pull(store, source("org/model:Q8_0"))
    assert store.find("org/model:Q8_0") is None
    hub.state.corrupt = False
    assert bodies(store, "org/model:Q8_0") == [("model-Q8_0.gguf", b"eight")]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("org/none", ModelNotFound, r"no org/none \(404\)"),
        ("org/empty", ModelNotFound, "no GGUF file and no safetensors folder"),
        ("org/model:Q3_K", ModelNotFound, "has no Q3_K; it offers .*Q8_0"),
        ("org/model:model-Q9_0.gguf", ModelNotFound, "did you mean org/model:model-Q8_0.gguf"),
        ("org/folder:Q4_0", ModelNotFound, "it offers no GGUF"),
        ("org/hostile", FetchFailed, "plain name"),
    ],
)
def test_what_the_hub_does_not_have(
    store: Store, text: str, error: type[SuperfluidError], message: str
) -> None:
    with pytest.raises(error) as caught:
        pull(store, source(text))
    assert caught.match(message) if "did you" not in message else message in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_gated_model_names_the_token(store: Store, hub: Hub) -> None:
    hub.state.gated.add("org/model")
    with pytest.raises(FetchFailed, match="licence must be accepted") as caught:
        pull(store, source("org/model"))
    assert "HF_TOKEN" in caught.value.fix


def test_a_private_model_wants_its_token(
    store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.state.token = "hf_right"
    with pytest.raises(ModelNotFound, match="401"):
        pull(store, source("org/model:Q8_0"))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert bodies(store, "org/model:Q8_0") == [("model-Q8_0.gguf", b"eight")]


def test_a_hub_in_trouble(store: Store, hub: Hub) -> None:
    hub.state.status = 503
    with pytest.raises(FetchFailed, match="answered 503"):
        pull(store, source("org/model"))


def test_a_hub_that_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub({}) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.endpoint)
    with pytest.raises(FetchFailed, match="cannot be reached"):
        pull(store, source("org/model"))


def test_hub_offline(store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Offline, match="HF_HUB_OFFLINE"):
        pull(store, source("org/model"))
    assert hub.state.ranges == []


@pytest.mark.parametrize(
    "text",
    ["model", "a/b/c", "org/", "/model", "a--b/c", "../x", "org/model:", "org/m:a:b", "o/m "],
)
def test_what_is_no_hub_id(text: str) -> None:
    assert HubId.parse(text) is None


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_two_ids_share_a_folder_and_none_leaves_the_store(left: str, right: str) -> None:
    ids = [HubId.parse(f"org/{text}") for text in (left, right)]
    folders = [folder_name(str(id_)) for id_ in ids if id_ is not None]
    assert all("/" not in folder and not folder.startswith(".") for folder in folders)
    if None not in ids and ids[0] != ids[1]:
        assert folders[0] != folders[1]


def test_of_several_matches_the_plainest_is_taken() -> None:
    files = [HubFile(f"{name}.gguf", 1) for name in ("m-UD-Q4_K_XL", "m-UD-Q4_K_M", "m-Q4_K_M")]
    hub_id = HubId("org/m", "Q4_K_M")
    assert [file.path for file in choose(hub_id, files)] == ["m-Q4_K_M.gguf"]


def test_a_split_model_with_a_part_missing_is_not_offered() -> None:
    files = [HubFile("m-00001-of-00003.gguf", 1), HubFile("m-00003-of-00003.gguf", 1)]
    with pytest.raises(ModelNotFound):
        choose(HubId("org/m"), files)


def wait_for_bytes(process: subprocess.Popen[str]) -> int:
    """How many bytes the pull says are on disk, once it says that some are."""
    assert process.stderr is not None
    for line in process.stderr:
        if "%" in line:
            return len(BIG) * int(line.partition("%")[0]) // 100
    raise AssertionError("the pull ended without a byte")

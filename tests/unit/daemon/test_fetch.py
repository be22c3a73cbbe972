"""Fetching over https: digests, silence, certificates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from superfluid.index import pip_environment
from superfluid.installs import fetch
from superfluid_compat.errors import ArtifactUnreachable, UsageError
from support.engine import FileServer, serving_files

CONTENT = b"an engine" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving_files(tmp_path / "files") as made:
        made.files["/x"] = CONTENT
        monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
        yield made


def bring(url: str, to: Path) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    fetch.fetch(url, to, sha256=DIGEST, size=len(CONTENT), progress=lambda *it: seen.append(it))
    return seen


def test_a_file_comes_whole_with_its_progress(server: FileServer, tmp_path: Path) -> None:
    seen = bring(f"{server.url}/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_server_that_falls_silent_is_left(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALL_S", 0.2)
    server.acts["/x"] = server.stall
    with pytest.raises(ArtifactUnreachable, match=r"said nothing for 0\.2 s"):
        bring(f"{server.url}/x", tmp_path / "x")


def test_a_certificate_that_nobody_vouches_for_is_refused(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ArtifactUnreachable, match=r"(?i)certificate"):
        bring(f"{server.url}/x", tmp_path / "x")
    assert server.asked == []


def test_the_hubs_token_goes_to_the_hub_alone(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def note(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Authorization"))
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT)

    server.acts["/x"] = note
    monkeypatch.setenv("HF_TOKEN", "token")
    for endpoint in (server.url, "https://127.0.0.1:1", "https://hub.invalid"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        bring(f"{server.url}/x", tmp_path / "x")
    assert seen == ["Bearer token", None, None]


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "ftp://127.0.0.1/x", "/etc/passwd"])
def test_only_https_is_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="no https URL"):
        bring(url, tmp_path / "x")


def test_pip_hears_of_the_network_alone() -> None:
    given = {
        "PIP_INDEX_URL": "u", "PIP_TARGET": "t", "PIP_USER": "1", "PYTHONPATH": "p",
        "HTTPS_PROXY": "h", "PIP_CERT": "c",
    }  # fmt: skip
    assert pip_environment(given) == {"PIP_INDEX_URL": "u", "HTTPS_PROXY": "h", "PIP_CERT": "c"}

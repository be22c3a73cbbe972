"""A small server of the shape that `huggingface_hub` talks to, with faults to order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class HubState:
    """What the hub holds and how it misbehaves; tests change it while it serves.

    `files` maps a repository to its files. `corrupt` sends other bytes than announced, `cut_after`
    closes each body after that many bytes, `stall_after` sends that many and then waits for
    `resume`, `status` answers everything with an error, `redirect` sends bodies by way of another
    path, `gated` names repositories whose licence was not accepted, `token` is what private ones
    want. `ranges` records the start of every body that was asked for.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    corrupt: bool = False
    ignore_range: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    status: int | None = None
    redirect: bool = False
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    ranges: list[int] = field(default_factory=list)
    resume: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Hub:
    """A running hub: its endpoint, and its state."""

    endpoint: str
    state: HubState


@contextlib.contextmanager
def serving_hub(files: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub on an ephemeral loopback port until the block ends."""
    state = HubState(files=files)
    handler = type("BoundHandler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", state)
    finally:
        state.resume.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: HubState
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name inherited
        """Nothing: tests read `state`."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.state.status is not None:
            self._refuse(self.state.status, "Overloaded")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            if self._allowed(match[1]):
                self._json(_model_info(match[1], self.state.files[match[1]]))
        elif match := re.fullmatch(r"(/cdn)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if self._allowed(match[2]):
                self._file(match[2], match[4], body=body, redirected=bool(match[1]))
        else:
            self._refuse(404, "EntryNotFound")

    def _allowed(self, repository: str) -> bool:
        wanted = f"Bearer {self.state.token}"
        if self.state.token is not None and self.headers.get("Authorization") != wanted:
            self._refuse(401, "RepoNotFound")
        elif repository not in self.state.files:
            self._refuse(404, "RepoNotFound")
        elif repository in self.state.gated:
            self._refuse(403, "GatedRepo")
        else:
            return True
        return False

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, repository: str, name: str, *, body: bool, redirected: bool) -> None:
        content = self.state.files[repository].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        if self.state.redirect and not redirected:
            self.send_response(302)
            self.send_header("Location", f"/cdn{self.path}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{_sha256(content)}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = self._start()
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_sha256(content)}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.state.ranges.append(start)
            self._body(content[start:])

    def _start(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match and not self.state.ignore_range else 0

    def _body(self, content: bytes) -> None:
        state = self.state
        if state.corrupt:
            content = bytes(byte ^ 0xFF for byte in content)
        with contextlib.suppress(ConnectionError):
            if state.cut_after is not None:
                cut, state.cut_after = state.cut_after, None
                self.wfile.write(content[:cut])
                self.close_connection = True
            elif state.stall_after is not None:
                self.wfile.write(content[: state.stall_after])
                self.wfile.flush()
                state.stalled.set()
                state.resume.wait()
                self.wfile.write(content[state.stall_after :])
            else:
                self.wfile.write(content)


def _model_info(repository: str, files: dict[str, bytes]) -> dict[str, object]:
    return {
        "_id": "1",
        "id": repository,
        "modelId": repository,
        "sha": COMMIT,
        "private": False,
        "tags": ["license:apache-2.0"],
        "downloads": 0,
        "likes": 0,
        "siblings": [_sibling(name, content) for name, content in files.items()],
    }


def _sibling(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
    if not name.endswith((".json", ".md", ".txt")):
        entry["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 130}
    return entry


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

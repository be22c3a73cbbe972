"""The third party's engine: its libraries compiled here, its adapter installed as a wheel."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import trustme

from superfluid import cli
from superfluid_workerd.link.answers import Archive, InstallPlan
from support.server import Ended, environment

ENGINE = Path(__file__).resolve().parents[1] / "fakes" / "engine"


def library(path: Path, version: str = "2.0", abi: int | None = 2, devices: int = 1) -> Path:
    """A shared library at `path` that states this version, ABI number (or none) and devices."""
    lines = [
        f'const char *engine_version(void) {{ return "{version}"; }}',
        f"int engine_devices(void) {{ return {devices}; }}",
        f"int engine_abi(void) {{ return {abi}; }}" if abi is not None else "",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"],
        input="\n".join(lines), text=True, check=True,
    )  # fmt: skip
    return path


def tarball(members: Sequence[tuple[str, bytes]]) -> bytes:
    """A tar.gz file of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@dataclass
class Engine:
    """An environment in which the engine's adapter is installed beside superfluid.

    `python` runs it, `archive` is a release's file by version.
    """

    folder: Path
    python: Path
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, **extra: str) -> Ended:
        """`superfluid ARGUMENTS` in this process, its workers in the engine's environment."""
        out, err = io.StringIO(), io.StringIO()
        site = next(self.folder.glob("lib/python*/site-packages"))
        with (
            mock.patch.dict(os.environ, self.environment(**extra), clear=True),
            mock.patch.object(sys, "executable", str(self.python)),
            mock.patch.object(sys, "path", [str(site), *sys.path]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = cli.run(arguments)
        return Ended(code, out.getvalue(), err.getvalue())

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "superfluid", *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        return environment(self.home, **{**self.extra, **extra})

    def json(self, *arguments: str, **extra: str) -> Any:
        """The answer of a command that succeeds."""
        ended = self(*arguments, "--json", **extra)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    def rows(self, **extra: str) -> list[dict[str, Any]]:
        """The engine's rows in `runtimes --json`."""
        found = self.json("runtimes", **extra)["runtimes"]
        return [row for row in found if row["id"] == "engine"]

    def offer(self, *plans: InstallPlan, here: str | None = None) -> None:
        """Have the adapter's recipe name these, newest first; `here` is the first one's."""
        releases = [
            {"plan": plan, "here": here if number == 0 else None}
            for number, plan in enumerate(plans)
        ]
        (self.folder / "engine-recipe.json").write_bytes(msgspec.json.encode(releases))

    def hold(self, where: str) -> Path:
        """Have the adapter stand still at `finish` or `check` until this file is removed."""
        path = self.folder / f"hold-{where}"
        path.touch()
        return path

    @property
    def runtimes(self) -> Path:
        return self.home / "data" / "runtimes" / "engine"


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel in it and all that this one has; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    here = sysconfig.get_path("purelib")
    (site / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
         "--no-index", "--disable-pip-version-check", str(wheel)],
        check=True,
    )  # fmt: skip
    return python


def build_wheel(folder: Path) -> Path:
    """The adapter's own wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder),
         "--disable-pip-version-check", str(ENGINE)],
        check=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def release(
    server: FileServer, version: str, path: str = "", backend: str = "cpu", **about: Any
) -> InstallPlan:
    """A version of the engine whose archive `server` has, and the plan that installs it."""
    made = library(server.folder / f"{version}-{backend}.so", version, **about)
    content = tarball([("engine/lib/libengine.so", made.read_bytes()), ("engine/README", b"hi")])
    name = f"/engine-{version}-{backend}.tar.gz"
    server.files[name] = content
    archive = Archive(
        url=server.url + (path or name),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        strip=1,
    )
    return InstallPlan(version=version, backend=backend, artifacts=(archive,))


@dataclass
class FileServer:
    """An https server on loopback. `acts` answer for their paths, else `files` do."""

    folder: Path
    url: str
    certificate: Path
    files: dict[str, bytes] = field(default_factory=dict)
    acts: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def stall(self, handler: BaseHTTPRequestHandler) -> None:
        """An act: say nothing until the server ends."""
        self.over.wait(60)


@contextlib.contextmanager
def serving_files(folder: Path) -> Iterator[FileServer]:
    """A server with a certificate made for it; `certificate` is what vouches for it."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    certificate = folder / "authority.pem"
    authority.cert_pem.write_to_path(str(certificate))
    found = FileServer(folder, "", certificate)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.asked.append(self.path)
            act = found.acts.get(self.path)
            if act is not None:
                act(self)
                return
            content = found.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name inherited
            """Nothing: tests read `asked`."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that left is what tests are about."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    server = Server(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    found.url = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        thread.join()
        server.server_close()

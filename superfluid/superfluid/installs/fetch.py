"""Fetching one file by https, its SHA-256 known before."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path
from typing import Final

import httpx

from superfluid.models.pull import Progress, size_text
from superfluid_compat.errors import ArtifactMismatch, ArtifactUnreachable, UsageError

STALL_S: Final = 30.0
"""Longest silence of a server."""
MOST_BYTES: Final = 16 << 30
"""Bound for a file whose size nobody stated."""

_HUB: Final = "https://huggingface.co"
_REDIRECTS: Final = 5
_BLOCK_BYTES: Final = 1 << 18


def require_https(url: str) -> None:
    """Raise `UsageError` for a URL that is not https."""
    if httpx.URL(url).scheme != "https":
        raise UsageError(f"{url} is no https URL, wanted one", fix="give an https URL or a path")


def fetch(url: str, to: Path, *, sha256: str, size: int | None, progress: Progress) -> None:
    """Bring `url` into the file `to`; every redirect must be https too.

    Raises `ArtifactUnreachable`, `ArtifactMismatch`, `UsageError` (no https URL), `OSError`.
    """
    require_https(url)
    client = httpx.Client(
        follow_redirects=True,
        max_redirects=_REDIRECTS,
        timeout=httpx.Timeout(STALL_S),
        headers=_credentials(url),
        event_hooks={"request": [_only_https]},
    )
    try:
        with client, client.stream("GET", url) as answer:
            answer.raise_for_status()
            found = _write(answer, to, size, progress)
    except httpx.HTTPStatusError as error:
        raise ArtifactUnreachable(
            f"{url} answers {error.response.status_code}, wanted 200"
        ) from error
    except httpx.TimeoutException as error:
        raise ArtifactUnreachable(f"{url} said nothing for {STALL_S:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        raise ArtifactUnreachable(f"{url} cannot be fetched: {_reason(error)}") from error
    if found != sha256:
        raise ArtifactMismatch(f"{url} has SHA-256 {found}, wanted {sha256}")


def _credentials(url: str) -> dict[str, str]:
    """The hub's token, for a file of the hub; a redirect to another host does not take it along."""
    token, hub = os.environ.get("HF_TOKEN"), os.environ.get("HF_ENDPOINT", _HUB)
    asked, known = httpx.URL(url), httpx.URL(hub)
    if not token or (asked.host, asked.port) != (known.host, known.port):
        return {}
    return {"Authorization": f"Bearer {token}"}


def _only_https(request: httpx.Request) -> None:
    if request.url.scheme != "https":
        raise httpx.UnsupportedProtocol(f"it redirects to {request.url}, which is no https URL")


def _write(answer: httpx.Response, to: Path, size: int | None, progress: Progress) -> str:
    """The SHA-256 of what came; never more than `size` bytes are taken."""
    most = MOST_BYTES if size is None else size
    stated = int(answer.headers.get("content-length", 0))
    digest, done = hashlib.sha256(), 0
    with to.open("wb") as out:
        # Raw bytes: a digest is of the file, not of what a content encoding makes of it.
        for block in answer.iter_raw(_BLOCK_BYTES):
            done += len(block)
            if done > most:
                raise ArtifactMismatch(
                    f"{answer.url} is longer than {size_text(most)}, wanted {most} bytes"
                )
            digest.update(block)
            out.write(block)
            progress(done, size or stated)
    if size is not None and done != size:
        raise ArtifactMismatch(f"{answer.url} has {done} bytes, wanted {size}")
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

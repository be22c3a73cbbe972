"""What an install was asked for, checked before anything is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superfluid.catalog.catalog import Row
from superfluid.installs.fetch import require_https
from superfluid.installs.store import install_name, is_name
from superfluid_compat.errors import NotInstallable, RuntimeUnavailable, UsageError
from superfluid_workerd.link.answers import Version
from superfluid_workerd.options import nearest


@dataclass(frozen=True, slots=True)
class Order:
    """What to install. `source` is a path or an https URL, which needs its `sha256`."""

    version: str | None = None
    backend: str | None = None
    source: str | None = None
    sha256: str | None = None
    untested: bool = False


def require_installable(row: Row) -> None:
    """Raise `NotInstallable` for a runtime that ships with its adapter."""
    if row.info is not None and row.info.bundled:
        raise NotInstallable(
            f"runtime {row.id} ships with {row.entry.distribution} and is not installed on its own",
            fix=f"use it as it is: superfluid serve --runtime {row.id}",
        )


def check_source(order: Order) -> None:
    """Nothing is fetched whose digest is not known before. Raises `UsageError`."""
    if order.source is None:
        if order.sha256 is not None:
            raise UsageError("--sha256 goes with --from", fix="name the archive with --from")
        return
    if is_url(order.source):
        require_https(order.source)
        if order.sha256 is None:
            raise UsageError(
                f"--from {order.source} has no known SHA-256, wanted one before anything is "
                "fetched",
                fix="give --sha256 as whoever published it states it",
            )
    elif not Path(order.source).expanduser().exists():
        raise UsageError(f"there is nothing at {order.source}", fix="name a file or a folder")
    for what, name in (("version", order.version), ("backend", order.backend)):
        if name is not None and not is_name(name):
            raise UsageError(
                f"--{what} {name!r} cannot name an install, wanted a word of letters, digits, "
                "dots and hyphens",
                fix=f"give --{what} a plain word",
                param=what,
            )
    if order.sha256 is not None and not _is_digest(order.sha256):
        raise UsageError(f"--sha256 {order.sha256} is no SHA-256 in hex, wanted 64 digits")


def is_url(source: str) -> bool:
    return "://" in source


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(each in "0123456789abcdef" for each in text)


def choose_versions(row: Row, order: Order) -> list[Version]:
    """The version to install, as each backend that may be tried, best first.

    Raises `NotInstallable` (no such version or backend), `RuntimeUnavailable` (not here).
    """
    known = row.about.versions if row.about else ()
    if not known:
        raise NotInstallable(
            f"runtime {row.id} has no recipe to install from", fix="give --from PATH or URL"
        )
    fitting = _of_version(row, order.version, known)
    require_backend(row, order.backend, fitting)
    fitting = [it for it in fitting if order.backend in (None, it.backend)]
    here = [it for it in fitting if it.here is None]
    if not here:
        first = fitting[0]
        named = install_name(first.version, first.backend)
        raise RuntimeUnavailable(
            f"{row.id} {named} does not install on this machine: {first.here}",
            fix=f"see superfluid runtime versions {row.id}",
        )
    return [it for it in here if it.version == here[0].version]


def require_backend(
    row: Row, backend: str | None, known: Sequence[Version], fix: str | None = None
) -> None:
    """Raise `NotInstallable` for a backend that none of `known` has."""
    names = list(dict.fromkeys(it.backend for it in known))
    if backend is not None and backend not in names:
        raise _not_offered(row, "backend", backend, names, fix)


def _of_version(row: Row, version: str | None, known: Sequence[Version]) -> list[Version]:
    names = list(dict.fromkeys(it.version for it in known))
    if version is not None and version not in names:
        raise _not_offered(row, "version", version, names)
    return [it for it in known if version in (None, it.version)]


def _not_offered(
    row: Row, what: str, wanted: str, names: Sequence[str], fix: str | None = None
) -> NotInstallable:
    near = nearest(wanted, names)
    return NotInstallable(
        f"runtime {row.id} has no {what} {wanted} to install here, wanted one of "
        f"{', '.join(filter(None, names)) or 'none'}",
        fix=f"did you mean {near}?" if near else fix or f"see superfluid runtime versions {row.id}",
        param=what,
    )

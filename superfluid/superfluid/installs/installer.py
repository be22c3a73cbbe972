"""Installing a runtime: fetch what is pinned, stage it, have it checked, give it its name.

Everything happens beside the target. What fails, or is killed, leaves every other install as it
was; the next attempt cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.prepared import Preparations
from superfluid.catalog.standing import judge
from superfluid.catalog.workerd import Place
from superfluid.index import download
from superfluid.installs.archives import unpack
from superfluid.installs.environment import make_environment, pinned
from superfluid.installs.fetch import fetch
from superfluid.installs.folders import copy_folder
from superfluid.installs.order import (
    Order,
    check_source,
    choose_versions,
    is_url,
    require_backend,
    require_installable,
)
from superfluid.installs.store import (
    RECIPE,
    Install,
    Installs,
    Manifest,
    files_below,
    install_name,
    is_name,
    remove_tree,
    seal,
)
from superfluid.models.pull import Progress, digest_of, require_space
from superfluid.models.store import stamp
from superfluid_compat.errors import (
    ArtifactMismatch,
    ArtifactUnreachable,
    BadArchive,
    BadConfig,
    DigestMismatch,
    DiskFull,
    FetchFailed,
    InstallFailed,
    NoRoom,
    NotInstallable,
    SuperfluidError,
)
from superfluid_compat.verdicts import Rule, State, Verdict
from superfluid_workerd.link.answers import Archive, InstallPlan, Probe, Wheel

_MAPPED: Final[Mapping[type[SuperfluidError], type[InstallFailed]]] = {
    FetchFailed: ArtifactUnreachable,
    DigestMismatch: ArtifactMismatch,
    DiskFull: NoRoom,
}
"""What fetching raises for models, as an install's failure."""

LOCAL: Final = "local"
"""Backend of what `--from` names, where none was given."""

_INTERPRETER: Final = "venv/bin/python"
_STAGED: Final = "install"
_PLAN_ROOM: Final = 3
"""An artifact takes its own size and what it unpacks to, about twice that."""


class Reports(Protocol):
    """Whom an install tells."""

    def stage(self, name: str) -> None:
        """`plan`, `fetch`, `unpack`, `environment`, `finish`, `check`, `place`."""
        ...

    def progress(self, done: int, total: int) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What stands afterwards; `fresh` is False when it stood before."""

    install: Install
    fresh: bool
    in_use: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """An install that was made but has no name yet."""

    folder: Path
    plan: InstallPlan
    source: str
    sha256: str = ""
    interpreter: str = ""

    @property
    def place(self) -> Place:
        return Place(self.folder, self.folder / self.interpreter if self.interpreter else None)


@dataclass(frozen=True, slots=True)
class Installer:
    """Installs of one home."""

    catalog: Catalog
    installs: Installs
    preparations: Preparations
    reports: Reports
    waiting: Callable[[], None] = field(default=lambda: None)

    def plan(self, row: Row, order: Order) -> list[InstallPlan]:
        """What would be installed, by the recipe: the choice, then other backends to try.

        Raises `NotInstallable`, `RuntimeUnavailable` (not on this machine)."""
        chosen = choose_versions(row, order)
        return [
            asyncio.run(self.catalog.install_plan(row.id, each.version, each.backend))
            for each in chosen
        ]

    def install(self, row: Row, order: Order) -> Outcome:
        """Install it, unless it is here already.

        Raises `InstallFailed` and its leaves, the verdict's error when the staged runtime does
        not pass its check, `NotInstallable`, `UsageError`, `BadConfig` (cannot be written).
        """
        require_installable(row)
        check_source(order)
        with self.installs.lock(row.id, self.waiting), failures(self.installs.root):
            if order.source is not None:
                self.require_source(row, order)
                return self._place_first(row, order, [None])
            self.reports.stage("plan")
            plans = self.plan(row, order)
            here = self.installs.find(row.id, install_name(plans[0].version, plans[0].backend))
            if here is not None and here.fetched and here.missing() is None:
                self.installs.put_to_use(here)
                return Outcome(here, False, self._used(here))
            return self._place_first(row, order, plans)

    def repair(self, row: Row, install: Install) -> Outcome:
        """Make `install` whole from where it came from, unless every byte of it is right."""
        with self.installs.lock(row.id, self.waiting), failures(self.installs.root):
            remove_tree(self.installs.staging(row.id))
            manifest = install.manifest
            if install.damaged() is None and manifest is not None:
                self.reports.stage("check")
                probe = asyncio.run(self._probe(row, install.place))
                if judge(row, probe).allowing_untested().serves:
                    return Outcome(install, False, self._used(install))
            if manifest is None:
                raise InstallFailed(
                    f"install {install.name} does not say where it came from",
                    fix=f"remove it with superfluid runtime remove {row.id} {install.name}",
                )
            order = Order(
                source=None if install.fetched else manifest.source,
                sha256=manifest.sha256 or None,
                version=manifest.version,
                backend=manifest.backend,
                untested=manifest.untested,
            )
            plan = None if order.source else manifest.plan
            return self._place_first(row, order, [plan], keep=install.name)

    def _place_first(
        self, row: Row, order: Order, plans: Sequence[InstallPlan | None], keep: str = ""
    ) -> Outcome:
        """The first of `plans` whose backend finds a device."""
        for number, plan in enumerate(plans):
            try:
                return self._place(row, order, plan, keep)
            except _NoDevice as error:
                if number == len(plans) - 1:
                    raise error.verdict.error(row.id) from error
                self.reports.say(f"{row.id}: {error.verdict.found}; trying the next backend")
        raise NotInstallable(f"runtime {row.id} has nothing to install")

    def _place(self, row: Row, order: Order, plan: InstallPlan | None, keep: str) -> Outcome:
        """Stage, check and place one; `keep` is the name it must get again."""
        staging = self.installs.staging(row.id)
        try:
            with named_as(order.source, staging / _STAGED):
                staged = self._stage(row, order, plan, staging)
                self.reports.stage("check")
                probe = asyncio.run(self._probe(row, staged.place))
            probe = _told(probe, order.source, staged.folder)
            verdict = judge(row, probe)
            self._require(row, verdict, order)
            self.reports.stage("place")
            seal(staged.folder)
            manifest = _manifest(row, staged, probe, verdict, order)
            if keep and manifest.name != keep:
                raise InstallFailed(f"the source gives {manifest.name} now, wanted {keep}")
            same = None if keep else self._same(manifest)
            install = same or self.installs.place(staged.folder, manifest, staging)
        finally:
            remove_tree(staging)
        if not keep:
            self._take_up(install, verdict)
        return Outcome(install, same is None, self._used(install))

    def require_source(self, row: Row, order: Order) -> None:
        """Raise `NotInstallable` where the recipe makes an environment alone, which no files
        replace, and for a backend that the recipe does not know."""
        known = row.about.versions if row.about else ()
        plans = [
            asyncio.run(self.catalog.install_plan(row.id, each.version, each.backend))
            for each in known[:1]
        ]
        if any(plan.environment and not plan.artifacts for plan in plans):
            own = row.info.own_option if row.info else None
            serve = f"; an environment of your own serves with --{row.id}-{own}" if own else ""
            raise NotInstallable(
                f"runtime {row.id} is installed as an environment of its own, which cannot be made "
                f"from {order.source}",
                fix=f"leave --from out{serve}",
            )
        if known and order.backend != LOCAL:
            require_backend(row, order.backend, known, fix=f"leave it out, it is {LOCAL} then")

    def _same(self, manifest: Manifest) -> Install | None:
        """The install that has the manifest's name, when it holds the same files. One that holds
        others may be running: it is not replaced. Raises `InstallFailed`."""
        here = self.installs.find(manifest.runtime, manifest.name)
        if here is None or here.manifest is None or here.missing() is not None:
            return None
        if here.manifest.files == manifest.files:
            return here
        raise InstallFailed(
            f"install {here.name} is here already and holds other files, from "
            f"{here.manifest.source}",
            fix=f"give another --version, or first superfluid runtime remove {here.runtime} "
            f"{here.name}",
        )

    def _take_up(self, install: Install, verdict: Verdict) -> None:
        """Put it to use, unless that would put an untested one in place of one that works."""
        used = self.installs.in_use(install.runtime)
        if verdict.serves or used is None or used.name == install.name:
            self.installs.put_to_use(install)
        else:
            self.reports.say(
                f"{install.runtime}: {used.name} stays in use; {install.name} is untested and "
                f"serves with --runtime {install.runtime}@{install.name} --untested"
            )

    def _stage(self, row: Row, order: Order, plan: InstallPlan | None, staging: Path) -> Staged:
        folder = staging / _STAGED
        folder.mkdir(mode=0o700)
        if plan is None:
            source, given = self._from_source(order, folder, staging)
            plan = InstallPlan(
                version=order.version or "", backend=order.backend or LOCAL, artifacts=given
            )
            sha256 = given[0].sha256 if given else ""
        else:
            source, sha256 = RECIPE, ""
            self._from_recipe(plan, folder, staging)
        staged = Staged(folder, plan, source, sha256, _INTERPRETER if plan.environment else "")
        self.reports.stage("finish")
        asyncio.run(self.catalog.finish_install(row.id, plan, staged.place))
        return staged

    def _from_recipe(self, plan: InstallPlan, folder: Path, staging: Path) -> None:
        for note in plan.notes:
            self.reports.say(note)
        sizes = [each.size for each in (*plan.artifacts, *plan.environment)]
        require_space(staging, _PLAN_ROOM * sum(sizes))
        done = 0
        for artifact in plan.artifacts:
            self.reports.stage("fetch")
            counted = self._counted(done, sum(sizes))
            path = _bring(artifact, staging, counted)
            done += artifact.size
            self.reports.stage("unpack")
            strip = artifact.strip if isinstance(artifact, Archive) else 0
            unpack(path, inside(folder, artifact.into), strip=strip)
            path.unlink()
        if plan.environment:
            self.reports.stage("environment")
            make_environment(folder / "venv", plan.environment, staging)

    def _from_source(
        self, order: Order, folder: Path, staging: Path
    ) -> tuple[str, tuple[Archive, ...]]:
        """What `--from` names, unpacked; where it came from and, unless it is a folder, the file
        that it was."""
        source = str(order.source)
        path = Path(source).expanduser()
        if is_url(source):
            self.reports.stage("fetch")
            path = staging / "download"
            counted = self._counted(0, 0)
            fetch(source, path, sha256=str(order.sha256), size=None, progress=counted)
        else:
            self.reports.say(f"{path} is installed as it is: nobody vouches for it")
            source = str(path.absolute())
        self.reports.stage("unpack")
        if path.is_dir():
            copy_folder(path, folder)
            return source, ()
        given = Archive(url=source, size=path.stat().st_size, sha256=digest_of(path))
        if order.sha256 and given.sha256 != order.sha256:
            raise ArtifactMismatch(f"{path} has SHA-256 {given.sha256}, wanted {order.sha256}")
        if _is_library(path):
            folder.mkdir(exist_ok=True)
            shutil.copy2(path, folder / path.name)
        else:
            unpack(path, folder)
        return source, (given,)

    def _counted(self, before: int, total: int) -> Progress:
        return lambda done, size: self.reports.progress(before + done, total or size)

    def _require(self, row: Row, verdict: Verdict, order: Order) -> None:
        if verdict.rule == Rule.NO_DEVICE:
            raise _NoDevice(verdict)
        allowed = verdict.allowing_untested() if order.untested else verdict
        if not allowed.serves:
            raise allowed.error(row.id)
        if verdict.state is State.UNTESTED:
            self.reports.say(f"{row.id}: {verdict.problem}; installed because of --untested")

    async def _probe(self, row: Row, place: Place) -> Probe:
        options = {option.name: option.default for option in row.options}
        shared = self.preparations.shared(row.id)
        return await self.catalog.check(row.id, options, shared, place)

    def _used(self, install: Install) -> bool:
        used = self.installs.in_use(install.runtime)
        return used is not None and used.name == install.name


class _NoDevice(Exception):
    """The staged backend works but has nothing to compute on."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.found)
        self.verdict = verdict


def _manifest(row: Row, staged: Staged, probe: Probe, verdict: Verdict, order: Order) -> Manifest:
    version = staged.plan.version or probe.version
    name = install_name(version, staged.plan.backend)
    if not is_name(name):
        raise InstallFailed(f"runtime {row.id} calls this {name!r}, wanted a version in one word")
    return Manifest(
        runtime=row.id,
        name=name,
        version=version,
        backend=staged.plan.backend,
        source=staged.source,
        plan=staged.plan,
        installed=stamp(),
        adapter=row.info.version if row.info else "",
        abi=probe.abi,
        sha256=staged.sha256,
        untested=verdict.state is State.UNTESTED,
        interpreter=staged.interpreter,
        files=files_below(staged.folder),
    )


def _bring(artifact: Wheel | Archive, staging: Path, progress: Progress) -> Path:
    """The artifact's file, verified."""
    if isinstance(artifact, Archive):
        path = staging / "download"
        fetch(artifact.url, path, sha256=artifact.sha256, size=artifact.size, progress=progress)
        return path
    folder = Path(tempfile.mkdtemp(dir=staging, prefix="wheel-"))
    return download(pinned(artifact), folder, lambda done: progress(done, artifact.size))


def inside(folder: Path, into: str) -> Path:
    """`into` below `folder`. Raises `BadArchive` for one that leads out of it."""
    path = folder / into
    if ".." in Path(into).parts or Path(into).is_absolute():
        raise BadArchive(f"the recipe unpacks into {into}, wanted a folder of the install")
    return path


def _is_library(path: Path) -> bool:
    """Whether `path` begins as a shared library does: ELF, or Mach-O of one machine or several."""
    with path.open("rb") as file:
        return file.read(4) in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


@contextlib.contextmanager
def named_as(source: str | None, staged: Path) -> Iterator[None]:
    """Errors speak of `source`, or of files by their place in an install, and not of the copy
    that is gone when they are read."""
    try:
        yield
    except SuperfluidError as error:
        error.message = _elsewhere(error.message, source, staged)
        error.fix = _elsewhere(error.fix, source, staged)
        raise


def _told(probe: Probe, source: str | None, staged: Path) -> Probe:
    """The probe in the words of `named_as`."""
    if probe.problem is None:
        return probe
    return msgspec.structs.replace(
        probe,
        problem=_elsewhere(probe.problem, source, staged),
        fix=_elsewhere(probe.fix, source, staged),
    )


def _elsewhere(text: str, source: str | None, staged: Path) -> str:
    for folder in (str(staged.resolve()), str(staged)):
        if source is None:
            text = text.replace(f"{folder}/", "").replace(folder, "the install")
        elif Path(source).is_file():
            text = text.replace(f"{folder}/{Path(source).name}", source)
        text = text.replace(folder, source or "")
    return text


@contextlib.contextmanager
def failures(root: Path) -> Iterator[None]:
    """What fails underneath, as an install's failure."""
    try:
        yield
    except tuple(_MAPPED) as error:
        kind = next(new for old, new in _MAPPED.items() if isinstance(error, old))
        known = error.fix != type(error).default_fix
        raise kind(error.message, fix=error.fix if known else None) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"the disk of {root} is full") from error
        reason = (error.strerror or str(error)).lower()
        where = error.filename or root
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise BadConfig(f"{where} cannot be written: {reason}") from error
        raise InstallFailed(f"{where}: {reason}") from error


__all__ = ["Installer", "Order", "Outcome", "Reports"]

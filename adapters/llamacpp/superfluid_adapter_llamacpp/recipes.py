"""Which builds install on their own, from where, by which digests; and which suit this machine.

Wheels of the package index whose extension module exports the C interface (it is loaded by its
path, never imported), and llama.cpp's own release archives. A GPU's builds come before the
processor's where the machine has one; within them, the newest first.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from superfluid_adapter_llamacpp.elf import here as machine
from superfluid_compat.errors import RuntimeBroken, Unsupported
from superfluid_workerd.adapter import Archive, Artifact, InstallPlan, Version, Wheel

RECORD: Final = "llamacpp.json"
_BUILD: Final = "b11284"
_CONTRACT: Final = 7
"""What llama.cpp's own archives are of."""

_RELEASE: Final = "https://github.com/ggml-org/llama.cpp/releases/download"
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_DRIVERS: Final = {"cuda-13.4": 580, "cuda-12.8": 570}
"""The oldest driver for each CUDA, by its major version."""

_VULKAN: Final = ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib")
_RENDERERS: Final = Path("/dev/dri")
_AMD: Final = Path("/dev/kfd")
"""The device of the driver that ROCm computes through."""

_ROCM: Final = "no ROCm build is pinned by digest, one of your own installs with --from"


class Installed(msgspec.Struct, frozen=True):
    """What an install says of itself: the backend it was chosen for and, where it was made of
    what a recipe of ours pins, the digest of each of its files."""

    backend: str
    files: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One build for one kind of machine; `platform` is as `here` gives it."""

    build: str
    contract: int
    backend: str
    platform: str
    artifacts: tuple[Artifact, ...]


_WHEELS: Final = {"b11549": (8, "2026.10.11549"), "b11063": (7, "2026.9.11063")}
"""Contract and version by build."""


def _wheel(build: str, at: str, size: int, digest: str) -> Recipe:
    backend = "metal" if at.startswith("darwin") else "cpu"
    contract, version = _WHEELS[build]
    wheel = Wheel(name="xllamacpp", version=version, size=size, sha256=digest)
    return Recipe(build, contract, backend, at, (wheel,))


def _archive(backend: str, at: str, *parts: tuple[str, int, str]) -> Recipe:
    archives = tuple(
        Archive(url=f"{_RELEASE}/{_BUILD}/{name.format(_BUILD)}", size=size, sha256=digest)
        for name, size, digest in parts
    )
    return Recipe(_BUILD, _CONTRACT, backend, at, archives)


_X86, _ARM, _MAC = "linux-x86_64", "linux-aarch64", "darwin-aarch64"
RECIPES: Final = (
    _archive(
        "cuda-13.4", _X86,
        ("llama-{}-bin-ubuntu-cuda-13.4-x64.tar.gz", 151899372,
         "96819d3f24a1bb25f41a01837cece8ac3f519d43475ffb25e0f557cc82d637cd"),
        ("cudart-llama-{}-bin-ubuntu-cuda-13.4-x64.tar.gz", 440236615,
         "273038c644f2fed2876f423cec775fdea57303d389094bcc41e7f2f8b5dc186e"),
    ),
    _archive(
        "cuda-12.8", _X86,
        ("llama-{}-bin-ubuntu-cuda-12.8-x64.tar.gz", 171058861,
         "409b69983143dfcdfefb4ad1ae931e318c3ee0210562e7873447ea4573f3199b"),
        ("cudart-llama-{}-bin-ubuntu-cuda-12.8-x64.tar.gz", 594377553,
         "c8b9f1d3841458938eeba402acd0f64de83ca281e232300be55d4b9091305edb"),
    ),
    _archive(
        "vulkan", _X86,
        ("llama-{}-bin-ubuntu-vulkan-x64.tar.gz", 31384589,
         "3b5ddda5a6f53550cf7740b056f94afdeaa1f86c5b93cbcd619821158ba3c9d3"),
    ),
    _wheel("b11549", _X86, 33827498,
           "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261"),
    _wheel("b11549", _ARM, 32870844,
           "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e"),
    _wheel("b11549", _MAC, 12152949,
           "4ecda27a308b2403aa13c9d04b270befab95edc556c24ed00b2f8a98bd7f6781"),
    _archive(
        "cpu", _X86,
        ("llama-{}-bin-ubuntu-x64.tar.gz", 17438632,
         "f53f2534e7ac8df1ef056117d215f1581feb6c426310d6423efac9adcdd5c2c8"),
    ),
    _archive(
        "cpu", _ARM,
        ("llama-{}-bin-ubuntu-arm64.tar.gz", 13530496,
         "c14e00a60e0bf3d1e6c65cad0d60ad08fe6bf014bcadee993184285179e9bf6c"),
    ),
    _archive(
        "metal", _MAC,
        ("llama-{}-bin-macos-arm64.tar.gz", 11797542,
         "f26782642b52467e1c1f7814349c478d5477d61887aeb237b7fe1ee1527554e5"),
    ),
    _wheel("b11063", _X86, 33054267,
           "329ac1478b66be40d8338d15272bcd9aebfe09834ca4daf7813cc2c8c1bdad90"),
    _wheel("b11063", _ARM, 32237032,
           "b88a42b2d586b91e707f81a3e6faabfaf0c604a726af517ba214a2f3d00fae6e"),
    _wheel("b11063", _MAC, 11289028,
           "895429a281cb18da2e34108758c1950749d6c4ab47d56574ea7d79a11c5e727c"),
)  # fmt: skip


def here() -> str:
    """This machine, as recipes name it."""
    return f"{sys.platform}-{machine()}"


def versions() -> list[Version]:
    """What installs on this platform, what suits this machine best first."""
    fitting = [one for one in RECIPES if one.platform == here()]
    shown = [
        Version(
            version=one.build,
            backend=one.backend,
            here=_lacking(one.backend),
            contract=one.contract,
        )
        for one in fitting
    ]
    if here() == _X86 and _AMD.exists():
        shown.append(Version(version=_BUILD, backend="rocm", here=_ROCM, contract=_CONTRACT))
    if shown:
        return sorted(shown, key=lambda one: one.here is not None)
    named = dict.fromkeys((one.build, one.contract) for one in RECIPES)
    reason = f"no build is for {platform.system()} {machine()}"
    return [Version(version=build, here=reason, contract=number) for build, number in named]


def plan(build: str, backend: str) -> InstallPlan:
    """How to install a build here. Raises `Unsupported` for one that is not offered."""
    for one in RECIPES:
        fits = one.platform == here() and one.build == build
        if fits and backend in ("", one.backend):
            notes = (_ROCM,) if _AMD.exists() else ()
            return InstallPlan(
                version=build, backend=one.backend, artifacts=one.artifacts, notes=notes
            )
    raise Unsupported(f"there is no {build} {backend} of llama.cpp for {here()}")


def finish(chosen: InstallPlan, staged: Path) -> None:
    """Lay libraries that came in folders of their own beside libllama, and note the backend and,
    of artifacts that are pinned here, what is to be trusted from now on.

    Raises `RuntimeBroken` when no library was staged, or several that differ.
    """
    from superfluid_adapter_llamacpp.search import NotFound, SeveralFound, library_in

    try:
        home = library_in(staged).parent
    except SeveralFound as error:
        raise RuntimeBroken(f"{staged}: {error}", fix="give the folder of one of them") from error
    except NotFound as error:
        raise RuntimeBroken(f"{staged}: {error}", fix="give a build that holds libllama") from error
    for path in _strays(staged, home):
        shutil.move(path, home / path.name)
    files = _digests(staged) if _pinned(chosen) else {}
    (staged / RECORD).write_bytes(msgspec.json.encode(Installed(chosen.backend, files)))


def backend_of(installed: Path) -> str:
    """The backend an install was chosen for; nothing for one that does not say."""
    return _record(installed).backend


def altered(installed: Path, loaded: Iterable[str]) -> str | None:
    """Which of the files `loaded` is not what a recipe of ours laid into the install, by its place
    there; None when all are. What lies elsewhere is the system's, and not looked at."""
    files, root = _record(installed).files, installed.resolve()
    real = [Path(one).resolve() for one in loaded]
    for path in (path for path in real if path.is_relative_to(root)):
        name = str(path.relative_to(root))
        if name not in files or _digest(path) != files[name]:
            return name
    return None


def by_recipe(installed: Path) -> bool:
    """Whether the install was made of artifacts that are pinned here, and of nothing else."""
    return bool(_record(installed).files)


def _record(installed: Path) -> Installed:
    try:
        return msgspec.json.decode((installed / RECORD).read_bytes(), type=Installed)
    except (OSError, msgspec.MsgspecError):
        return Installed("")


def _pinned(chosen: InstallPlan) -> bool:
    """Whether all that was unpacked is what one recipe names: by digest, whatever it is called."""
    given = {one.sha256 for one in chosen.artifacts}
    return any(given == {one.sha256 for one in recipe.artifacts} for recipe in RECIPES)


def _digests(staged: Path) -> dict[str, str]:
    found = [path for path in staged.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(staged)): _digest(path) for path in sorted(found)}


def _digest(path: Path) -> str:
    from superfluid_adapter_llamacpp.evidence import digest

    return digest(path)


def _strays(staged: Path, home: Path) -> Sequence[Path]:
    """Libraries of an archive that was unpacked elsewhere, such as CUDA's own."""
    found = [*staged.rglob("*.so*"), *staged.rglob("*.dylib")]
    outside = [path for path in found if path.parent != home and "cud" in path.name.lower()]
    return [path for path in outside if not (home / path.name).exists()]


def _lacking(backend: str) -> str | None:
    """What this machine lacks for a backend, or None."""
    if backend in _DRIVERS:
        driver = _driver()
        if driver is None:
            return "no NVIDIA driver is here"
        if driver < _DRIVERS[backend]:
            return f"the NVIDIA driver is {driver}, {backend} needs {_DRIVERS[backend]}"
    if backend == "vulkan" and not _has_vulkan():
        return "no Vulkan loader with a device is here"
    return None


def _driver() -> int | None:
    """The NVIDIA driver's major version."""
    try:
        words = _NVIDIA.read_text().split()
    except OSError:
        return None
    versions = (word.split(".")[0] for word in words if word.count(".") and word[0].isdigit())
    return next((int(major) for major in versions if major.isdigit()), None)


def _has_vulkan() -> bool:
    loader = any(any(Path(folder).glob("libvulkan.so.1*")) for folder in _VULKAN)
    return loader and _RENDERERS.is_dir()

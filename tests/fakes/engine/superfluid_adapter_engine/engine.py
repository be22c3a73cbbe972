"""The engine as an adapter. It serves what the fake runtime serves, once its library is judged."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from superfluid_compat.errors import Unsupported
from superfluid_compat.verdicts import Line, Requirement, Rule, State
from superfluid_workerd.adapter import (
    Adapter,
    AdapterInfo,
    Device,
    Facts,
    Format,
    InstallPlan,
    LoadedModel,
    OpenRequest,
    Option,
    Options,
    Probe,
    Tokenizer,
    Version,
)
from superfluid_workerd.options import Kind

if TYPE_CHECKING:
    from superfluid_adapter_fake.fake import FakeAdapter

REQUIRES = Requirement("engine ABI", (2,), (Line("0.3", 2), Line("0.1", 1)), ("2.0", "2.1"))
LIBRARY = "lib/libengine.so"
RECIPE = Path(sys.prefix) / "engine-recipe.json"
"""What a test has this adapter offer: `Release`s, newest first."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the recipe. `here` as in `Version`."""

    plan: InstallPlan
    here: str | None = None
    contract: int | None = 2


class EngineAdapter(Adapter):
    """Reads the fake's files."""

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            id="engine",
            summary="an engine that is installed on its own",
            formats=(Format(name="fake", magic=b"SFFAKE1\n".hex()),),
            aliases=("motor",),
            kit=1,
            version="2.0.0",
            bundled=False,
            requires=REQUIRES,
            own_option="lib",
        )

    def options(self) -> Sequence[Option]:
        return (
            Option("lib", Kind.PATH, "engine library to use in place of an install"),
            Option("gear", Kind.INTEGER, "nothing depends on it", 3, minimum=1, maximum=6),
        )

    def compat(self) -> dict[str, Any]:
        return {"symbols": ["engine_version"]}

    def versions(self) -> Sequence[Version]:
        return [
            Version(
                version=each.plan.version,
                backend=each.plan.backend,
                here=each.here,
                contract=each.contract,
            )
            for each in _recipe()
        ]

    def plan(self, version: str, backend: str) -> InstallPlan:
        for each in _recipe():
            if (each.plan.version, each.plan.backend) == (version, backend):
                return each.plan
        raise Unsupported(f"engine has no {version} {backend}")

    def install(self, plan: InstallPlan, staged: Path) -> None:
        _wait("finish")
        (staged / "environment.json").write_text(json.dumps(dict(os.environ)))

    def check(self, options: Options, shared: Path) -> Probe:
        _wait("check")
        named = options["lib"]
        if not isinstance(named, str) and self.installed is None:
            return Probe(version="", problem="no library", state=State.NOT_INSTALLED, rule="none")
        path = Path(named) if isinstance(named, str) else Path(str(self.installed), LIBRARY)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return Probe(version="", problem=f"{error}", rule="cannot-load", fix="reinstall it")
        return _probe(library)

    def facts(self, model: Path) -> Facts:
        """Needs no package that an environment of its own is not lent."""
        return Facts(format="fake", architecture="fake", bytes=model.stat().st_size)

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        return _fake().tokenizer(model, {})

    def open(self, request: OpenRequest) -> LoadedModel:
        return _fake().open(request)


def _probe(library: ctypes.CDLL) -> Probe:
    library.engine_version.restype = ctypes.c_char_p
    version = library.engine_version().decode()
    number = library.engine_abi() if hasattr(library, "engine_abi") else None
    devices = library.engine_devices() if hasattr(library, "engine_devices") else 1
    tested = not version.endswith("dev")
    if not devices:
        return Probe(version=version, problem="no device", rule=Rule.NO_DEVICE, fix="add one")
    borrowed = [name for name in ("httpx", "starlette") if importlib.util.find_spec(name)]
    where = "own" if borrowed == [] else "shared"
    return Probe(
        version=version,
        abi=number,
        tested=tested,
        devices=(Device(name=f"{where} python, {devices} cylinders"),),
    )


def _recipe() -> list[Release]:
    if not RECIPE.exists():
        return []
    return msgspec.json.decode(RECIPE.read_bytes(), type=list[Release])


def _fake() -> FakeAdapter:
    from superfluid_adapter_fake.fake import FakeAdapter

    return FakeAdapter()


def _wait(where: str) -> None:
    """Stand still while a test holds us there."""
    hold = Path(sys.prefix) / f"hold-{where}"
    while hold.exists():
        time.sleep(0.01)

"""What the llama.cpp runtime is. Importing this loads no engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from superfluid_adapter_llamacpp.contracts import contracts, known, served
from superfluid_adapter_llamacpp.settings import OPTIONS, Settings, check_devices
from superfluid_adapter_llamacpp.symbols import REQUIRED
from superfluid_compat.errors import RuntimeNotInstalled
from superfluid_compat.verdicts import Requirement, Rule, State
from superfluid_workerd.adapter import (
    Adapter,
    AdapterInfo,
    Facts,
    InstallPlan,
    LoadedModel,
    OpenRequest,
    Option,
    Options,
    Probe,
    Tokenizer,
    Version,
)
from superfluid_workerd.link.answers import GGUF

if TYPE_CHECKING:
    from superfluid_adapter_llamacpp.probe import Finding

_KIT: Final = 1
"""The kit this was written against."""

_WHAT: Final = "llama.cpp struct contract"


class LlamaCppAdapter(Adapter):
    """Reads GGUF files through a libllama that was installed, or one of the user's own."""

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            id="llamacpp",
            summary="llama.cpp through its C interface: GGUF models at its own speed",
            formats=(GGUF,),
            aliases=("llama.cpp", "llama"),
            kit=_KIT,
            version=importlib.metadata.version("superfluid"),
            bundled=False,
            requires=Requirement(_WHAT, served(), tested=_builds()),
            own_option="lib",
        )

    def options(self) -> Sequence[Option]:
        return OPTIONS

    def compat(self) -> dict[str, Any]:
        return {
            "formats": ["gguf"],
            "contracts": {
                str(number): {
                    "served": one.served,
                    "layouts": [one.model.name, one.context.name],
                    "builds": list(one.builds),
                }
                for number, one in contracts().items()
            },
            "tested": [
                {
                    "build": one.build,
                    "source": one.source,
                    "contract": one.contract,
                    "platform": one.platform,
                    "sha256": one.sha256,
                }
                for one in known().values()
            ],
            "symbols": sorted(REQUIRED),
        }

    def versions(self) -> Sequence[Version]:
        from superfluid_adapter_llamacpp.recipes import versions

        return versions()

    def plan(self, version: str, backend: str) -> InstallPlan:
        from superfluid_adapter_llamacpp.recipes import plan

        return plan(version, backend)

    def install(self, plan: InstallPlan, staged: Path) -> None:
        from superfluid_adapter_llamacpp.recipes import finish

        finish(plan, staged)

    def check(self, options: Options, shared: Path) -> Probe:
        from superfluid_adapter_llamacpp.probe import examine
        from superfluid_adapter_llamacpp.where import INSTALL, named_library

        settings = Settings.of(options)
        try:
            named = named_library(options, self.installed)
        except RuntimeNotInstalled as error:
            return Probe(
                version="",
                problem=error.message,
                rule=Rule.NOT_INSTALLED,
                state=State.NOT_INSTALLED,
                fix=error.fix,
            )
        finding = examine(named, shared)
        gpus = sum(device.kind == "gpu" for device in finding.devices)
        if finding.reason is None:
            if named == self.installed and (lacking := _without_device(named, gpus)):
                return lacking
            check_devices(settings, gpus)
            _check_members(settings, finding)
        tested, remedy = _trusted(finding, named, self.installed)
        fix = finding.fix or remedy
        if named != self.installed:
            # No install is looked at while a library is named.
            fix = fix.replace(INSTALL, f"{INSTALL} and name no library")
        return Probe(
            version=finding.version or "unknown",
            abi=finding.contract,
            devices=finding.devices,
            tested=tested,
            problem=finding.sentence or None,
            rule=finding.reason or Rule.WORKS,
            state=finding.judgement.state,
            fix=fix,
            files=_files(named, shared, finding),
        )

    def facts(self, model: Path) -> Facts:
        from superfluid_adapter_llamacpp.facts import facts_of
        from superfluid_adapter_llamacpp.gguf import read_header

        return facts_of(read_header(model))

    def vet(self, model: Path, options: Options) -> None:
        from superfluid_adapter_llamacpp.loading import vet

        vet(model, options, self.installed, self.shared)

    def memory(self, request: OpenRequest) -> Mapping[str, int]:
        from superfluid_adapter_llamacpp.gguf import read_header
        from superfluid_adapter_llamacpp.plan import make_plan

        return make_plan(read_header(request.model), Settings.of(request.options), request).parts

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        from superfluid_adapter_llamacpp.loading import load_tokenizer

        return load_tokenizer(model, options, self.installed, self.shared)

    def open(self, request: OpenRequest) -> LoadedModel:
        from superfluid_adapter_llamacpp.loading import load

        return load(request, self.installed)


def _check_members(settings: Settings, finding: Finding) -> None:
    """Refuse options that this library has no member for."""
    if finding.contract is not None:
        contract = contracts()[finding.contract]
        settings.model_members(contract)
        settings.context_members(contract)


def _files(named: Path, shared: Path, finding: Finding) -> tuple[str, ...]:
    """What a worker loads and goes by; the whole folder where it looks for backends itself."""
    from superfluid_adapter_llamacpp.probe import record

    if finding.reason is not None:
        return ()
    own = [str(record(named, shared)), *finding.files]
    return tuple([*own, finding.folder] if finding.folder else own)


def _builds() -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.build for one in known().values()))


def _without_device(installed: Path, gpus: int) -> Probe | None:
    """An install for a GPU that finds none: another backend may do."""
    from superfluid_adapter_llamacpp.recipes import backend_of

    backend = backend_of(installed)
    if gpus or backend in ("", "cpu", "local"):
        return None
    return Probe(
        version="unknown",
        problem=f"the {backend} build finds no device of its kind here",
        rule=Rule.NO_DEVICE,
        state=State.BROKEN,
        fix="install the cpu backend, or see to the GPU's driver",
    )


def _trusted(finding: Finding, named: Path, installed: Path | None) -> tuple[bool, str]:
    """Whether somebody tried this library, and what mends it where it was meant to be tried: an
    install by a recipe goes by what was installed, everything else by the tests' digests."""
    from superfluid_adapter_llamacpp.recipes import altered, by_recipe

    if finding.reason is not None or named != installed or not by_recipe(named):
        return finding.tested, ""
    other = altered(named, [finding.path, *finding.files])
    if other is None:
        return True, ""
    fix = f"{other} is not what was installed: run superfluid runtime repair llamacpp {named.name}"
    return False, f"{fix}, or allow it with --untested"

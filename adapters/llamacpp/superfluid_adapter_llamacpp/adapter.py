"""What the llama.cpp runtime is. Importing this loads no engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_llamacpp.contracts import contracts, served, tested
from superfluid_adapter_llamacpp.settings import OPTIONS, Settings, check_devices
from superfluid_adapter_llamacpp.symbols import REQUIRED
from superfluid_compat.errors import RuntimeNotInstalled
from superfluid_compat.verdicts import Requirement, Rule, State
from superfluid_workerd.adapter import (
    Adapter,
    AdapterInfo,
    Facts,
    LoadedModel,
    OpenRequest,
    Option,
    Options,
    Probe,
    Tokenizer,
)
from superfluid_workerd.link.answers import GGUF

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
            requires=Requirement(
                _WHAT, served(), tested=tuple(one.name for one in tested().values())
            ),
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
                {"name": one.name, "contract": one.contract, "platform": one.platform,
                 "sha256": one.sha256}
                for one in tested().values()
            ],
            "symbols": sorted(REQUIRED),
        }  # fmt: skip

    def check(self, options: Options, shared: Path) -> Probe:
        from superfluid_adapter_llamacpp.probe import examine
        from superfluid_adapter_llamacpp.where import named_library

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
        if finding.reason is None:
            check_devices(settings, sum(device.kind == "gpu" for device in finding.devices))
        return Probe(
            version=finding.version or "unknown",
            abi=finding.contract,
            devices=finding.devices,
            tested=bool(finding.tested),
            problem=finding.sentence or None,
            rule=finding.reason or Rule.WORKS,
            state=finding.judgement.state,
            fix=finding.fix,
        )

    def facts(self, model: Path) -> Facts:
        from superfluid_adapter_llamacpp.facts import facts_of
        from superfluid_adapter_llamacpp.gguf import read_header

        return facts_of(read_header(model))

    def memory(self, request: OpenRequest) -> Mapping[str, int]:
        from superfluid_adapter_llamacpp.gguf import read_header
        from superfluid_adapter_llamacpp.plan import make_plan

        return make_plan(read_header(request.model), Settings.of(request.options), request).parts

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        from superfluid_adapter_llamacpp.loading import load_tokenizer

        return load_tokenizer(model, options, self.installed)

    def open(self, request: OpenRequest) -> LoadedModel:
        from superfluid_adapter_llamacpp.loading import load

        return load(request, self.installed)

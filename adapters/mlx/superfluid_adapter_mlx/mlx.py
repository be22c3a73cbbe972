"""What the MLX runtime is. Importing this loads no engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_mlx.settings import OPTIONS
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
    Rights,
    Tokenizer,
    Version,
)
from superfluid_workerd.link.answers import SAFETENSORS

_KIT: Final = 1
"""The kit this was written against."""


class MlxAdapter(Adapter):
    """Reads MLX folders through mlx-lm, of either generation, in an environment of its own."""

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            id="mlx",
            summary="mlx-lm: MLX model folders, on Apple silicon's GPU or a CPU under Linux",
            formats=(SAFETENSORS,),
            aliases=("mlx-lm",),
            kit=_KIT,
            version=importlib.metadata.version("superfluid"),
            # On a CPU, MLX compiles kernels with the system's compiler while it runs.
            rights=Rights(spawn=True),
            bundled=False,
            own_option="venv",
        )

    def options(self) -> Sequence[Option]:
        return OPTIONS

    def compat(self) -> dict[str, Any]:
        from superfluid_adapter_mlx.recipes import TESTED

        return {
            "formats": [SAFETENSORS.name],
            "tested": [{"mlx": mlx, "mlx-lm": mlx_lm} for mlx, mlx_lm in TESTED],
        }

    def versions(self) -> Sequence[Version]:
        from superfluid_adapter_mlx.recipes import versions

        return versions()

    def plan(self, version: str, backend: str) -> InstallPlan:
        from superfluid_adapter_mlx.recipes import plan

        return plan(version, backend)

    def check(self, options: Options, shared: Path) -> Probe:
        from superfluid_adapter_mlx.probe import examine

        return examine(options, self.installed)

    def facts(self, model: Path) -> Facts:
        from superfluid_adapter_mlx.folder import facts_of, read_folder

        return facts_of(read_folder(model))

    def memory(self, request: OpenRequest) -> Mapping[str, int]:
        from superfluid_adapter_mlx.loading import plan

        return plan(request).parts

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        from superfluid_adapter_mlx.loading import load_tokenizer

        return load_tokenizer(model, options)

    def open(self, request: OpenRequest) -> LoadedModel:
        from superfluid_adapter_mlx.loading import load

        return load(request)

"""What the native runtime is. Importing this loads neither numpy nor numba."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_native.architectures import served
from superfluid_adapter_native.quants.types import TYPES
from superfluid_workerd.adapter import (
    Adapter,
    AdapterInfo,
    Facts,
    LoadedModel,
    OpenRequest,
    Option,
    Options,
    Probe,
    Progress,
    Tokenizer,
)
from superfluid_workerd.link.answers import GGUF, SAFETENSORS
from superfluid_workerd.options import Kind

OPTIONS: Final = (
    Option("cache-bytes", Kind.SIZE, "weights to keep in memory; the rest streams from disk. auto "
           "keeps what the memory budget leaves room for", "auto", minimum=0, keywords=("auto",),
           unit="bytes"),
    Option("layers", Kind.INDICES, "serve only these layers, for study; all by default",
           unit="layers"),
    Option("max-layers", Kind.INTEGER, "serve only the first so many of the layers", minimum=1,
           maximum=1 << 16, unit="layers"),
    Option("kv-type", Kind.CHOICE, "how keys and values are kept", "f32",
           choices=("f32", "f16", "q8_0")),
    Option("read-ahead", Kind.BOOLEAN, "read the next streamed layer while this one computes",
           default=True),
    Option("exact", Kind.BOOLEAN, "compute with activations as they are, in one order: a token's "
           "logits then repeat whatever else is served", default=False),
)  # fmt: skip


class NativeAdapter(Adapter):
    """Reads GGUF files and safetensors folders; runs anywhere numpy and numba do."""

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            id="native",
            kit=1,
            summary="superfluid's own runtime: any model size, streamed through memory by layers",
            formats=(GGUF, SAFETENSORS),
            aliases=("numpy",),
            version=importlib.metadata.version("superfluid"),
            streams=True,
        )

    def options(self) -> Sequence[Option]:
        return OPTIONS

    def compat(self) -> dict[str, Any]:
        return {
            "formats": ["gguf", "safetensors"],
            "types": [kind.name for kind in TYPES],
            "architectures": {name: one.serves for name, one in sorted(served().items())},
            "tested": {name: importlib.metadata.version(name) for name in ("numpy", "numba")},
        }

    def check(self, options: Options, shared: Path) -> Probe:
        from superfluid_adapter_native.readiness import probe

        return probe(options, shared)

    def facts(self, model: Path) -> Facts:
        from superfluid_adapter_native.config import configure
        from superfluid_adapter_native.facts import facts_of
        from superfluid_adapter_native.formats.open import open_source

        source = open_source(model)
        configure(source)
        return facts_of(source)

    def prepare(self, facts: Facts, options: Options, shared: Path, progress: Progress) -> None:
        from superfluid_adapter_native.readiness import warm

        warm(facts, options, shared, progress)

    def memory(self, request: OpenRequest) -> Mapping[str, int]:
        from superfluid_adapter_native.loading import memory_plan

        return memory_plan(request)

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        from superfluid_adapter_native.formats.open import open_vocabulary
        from superfluid_adapter_native.tokenizers.load import tokenizer_at

        return tokenizer_at(open_vocabulary(model))

    def open(self, request: OpenRequest) -> LoadedModel:
        from superfluid_adapter_native.loading import load

        return load(request)
